"""What all tables and figures are made with: frames, the summary over seeds, and specs of what is shown."""
