"""Keys and values, a cache whose rows differ in length. It knows neither drafts nor rules."""
