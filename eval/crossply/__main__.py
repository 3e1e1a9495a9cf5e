from crossply import main

main()
