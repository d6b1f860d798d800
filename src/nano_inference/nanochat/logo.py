"""The icon of GET /logo.svg: two speech bubbles, one with the letter n."""

LOGO = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" role="img" aria-label="nanochat">
<path fill="#8fb3e8" d="M30 12h24a6 6 0 0 1 6 6v18a6 6 0 0 1-6 6h-2v9l-9-9H30a6 6 0 0 1-6-6V18a6 6 0 0 1 6-6z"/>
<path fill="#1f5fbf" d="M10 22h26a6 6 0 0 1 6 6v18a6 6 0 0 1-6 6H21l-9 9v-9h-2a6 6 0 0 1-6-6V28a6 6 0 0 1 6-6z"/>
<path fill="none" stroke="#fff" stroke-width="4" stroke-linecap="round" d="M17 45V31M17 37q0-6 6-6t6 6v8"/>
</svg>
"""
