"""Pages and pictures: their frame, bars, colours and numbers; files written whole."""
