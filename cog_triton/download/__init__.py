"""Models and engines from elsewhere: fetched once, resumed, checked, with progress."""
