"""Pages and pictures: their frame, tables, colours and numbers; files written whole."""
