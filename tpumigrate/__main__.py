"""`python -m tpumigrate`"""

from tpumigrate.cli import main

if __name__ == "__main__":
    main()
