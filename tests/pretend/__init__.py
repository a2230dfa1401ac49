"""Whole runs on a pretend accelerator (`tests.pretend.device`), in a process of their own."""
