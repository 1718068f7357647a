"""What happens when something goes wrong: exceptions that end every rank."""
