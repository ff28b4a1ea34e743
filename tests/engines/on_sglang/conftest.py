"""Stubs stand before anything imports SGLang."""

import sglang_moe  # noqa: F401
