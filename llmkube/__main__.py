"""`python -m llmkube`: the same as the command `llmkube`, for images without a script folder."""

from llmkube.cli.main import main

if __name__ == "__main__":
    main()
