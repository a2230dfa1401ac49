from lightning_ssl.runs.cli import main

if __name__ == "__main__":
    main()
