"""For other people's frameworks, through their public hooks. Each module imports its framework; lowtide
itself imports none of them."""
