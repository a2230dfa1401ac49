from lightning_ssl.cli import main

if __name__ == "__main__":
    main()
