"""How the owner and its workers find and divide the work, through storage alone."""
