"""What this machine has, and which way a call takes on it: what `lowtide doctor` prints."""
