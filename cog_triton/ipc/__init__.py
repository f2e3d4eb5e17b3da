"""Messages between the processes of this project."""
