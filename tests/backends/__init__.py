"""Programs run on the real backends: fork servers, the TorchTPU simulator, a CPU reference."""
