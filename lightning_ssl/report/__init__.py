"""What a run leaves for people and programs: curves that stay small, summary.json, the page. Imports no torch."""
