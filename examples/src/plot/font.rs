//! The typeface of the pictures, and how wide text is in it.

use ftcore::{Error, ErrorKind, Result};
use ttf_parser::Face;

/// The one typeface (Ubuntu Light), compiled in: no machine has to have fonts.
pub struct Font(pub(super) Face<'static>);

impl Font {
    /// Reads the typeface.
    pub fn load() -> Result<Self> {
        Face::parse(epaint_default_fonts::UBUNTU_LIGHT, 0)
            .map(Self)
            .map_err(|e| {
                Error::new(
                    ErrorKind::Internal,
                    format!("the built-in font cannot be read: {e}"),
                )
            })
    }

    /// How wide `text` is at `size`, in the unit of `size`.
    pub fn width(&self, text: &str, size: f32) -> f32 {
        text.chars().map(|c| self.advance(c)).sum::<f32>() * size
    }

    /// How far the pen moves after `c`, in parts of the font's size; an unknown character counts as a space would.
    pub(super) fn advance(&self, c: char) -> f32 {
        let glyph = self.0.glyph_index(c).or_else(|| self.0.glyph_index(' '));
        let units = glyph.and_then(|g| self.0.glyph_hor_advance(g)).unwrap_or(0);
        f32::from(units) / f32::from(self.0.units_per_em())
    }
}
