"""The smoke check: a packed MoE layer on a real kernel or the emulator, against references."""
