"""`python -m paxcli` is `pax`."""

from paxcli.cli.startup import main

if __name__ == "__main__":
    main()
