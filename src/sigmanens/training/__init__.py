"""The objective and the parameter groups for its optimizer."""
