"""Weights in other formats than safetensors; each format one room."""
