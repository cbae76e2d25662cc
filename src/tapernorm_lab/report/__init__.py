"""Rows, tables and figures from the JSON files of finished jobs. No module here imports torch."""
