"""What a scheduler decided, turn by turn: written down, compared between ranks, and played again."""
