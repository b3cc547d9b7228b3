"""BatchNorm under accumulation: what no gradient can make up for, and its remedies."""
