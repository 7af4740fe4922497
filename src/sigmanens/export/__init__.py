"""Files that run without sigmanens: ONNX and torch.export."""
