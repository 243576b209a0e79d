raise SystemExit("python -m records is now: python -m speedrun COMMAND")
