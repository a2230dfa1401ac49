"""The methods of the five papers, one LightningModule a file."""
