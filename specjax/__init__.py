"""specjax: distil a draft, decode speculatively, prove that nothing changed."""
