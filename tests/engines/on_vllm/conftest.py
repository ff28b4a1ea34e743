"""Stubs stand before anything imports vLLM."""

import vllm_moe  # noqa: F401
