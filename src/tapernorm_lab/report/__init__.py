"""From the JSON that runs leave to rows, tables and figures; nothing here imports torch."""
