"""How the frame looks: the page's own parts, which live outside of the panes' shadow roots, and those of the frame's panes."""

PAGE_SX = {
    "& .header.MuiAppBar-root": {
        "backgroundColor": "background.paper", "backgroundImage": "none", "color": "text.primary", "boxShadow": "none",
        "borderBottom": "1px solid", "borderColor": "divider",
    },
    "& .header .title": {"color": "var(--mui-palette-text-primary) !important", "fontSize": "19px", "fontWeight": 680, "letterSpacing": "-0.01em"},
    "& .main": {"backgroundColor": "background.default"},
    "& .sidebar": {"backgroundColor": "background.default"},
}  # fmt: skip

# A tooltip of the sidebar stands below its button: to the right the sidebar's edge would cut it off.
TIP_BELOW = """
:host { position: relative; }
.MuiTooltip-popper { inset: 100% auto auto 0 !important; transform: none !important; width: max-content; max-width: 230px; pointer-events: none !important; }
.MuiTooltip-popper .MuiTooltip-tooltip { margin: 4px 0 0 !important; } .MuiTooltip-popper .MuiTooltip-arrow { display: none; }
"""

STATUS_CSS = """
:host { min-width: 0; flex: 1; }
.line { display: flex; justify-content: flex-end; gap: 4px 16px; font-size: 13px; white-space: nowrap; overflow: hidden; }
.line .state::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; background: var(--c); }
@media (max-width: 1000px) { .more { display: none; } }
@media (max-width: 600px) { .model { display: none; } }
"""
BANNER_CSS = """
:host { flex: 1; }
.died::before { content: "⚠ "; } .notice { white-space: pre-wrap; overflow-wrap: anywhere; }
.starting::before { content: ""; display: inline-block; width: 11px; height: 11px; margin-right: 9px; border-radius: 50%; vertical-align: -1px;
  border: 2px solid var(--panel-primary-color); border-right-color: transparent; animation: turn 1s linear infinite; }
@keyframes turn { to { transform: rotate(360deg); } }
@media (prefers-reduced-motion: reduce) { .starting::before { animation: none; } }
"""

BAR_STYLE = {
    "position": "sticky", "bottom": "8px", "z-index": "8", "box-shadow": "0 2px 14px rgb(0 0 0 / .10)", "border-radius": "12px",
}  # fmt: skip
