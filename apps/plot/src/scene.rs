//! A picture as a list of simple shapes. The layout is made once; whatever draws it (SVG here, PNG in the examples) writes the same
//! list, so that two of them cannot differ.

/// A colour with opacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour {
    /// Red, green and blue.
    pub rgb: [u8; 3],
    /// Opacity, 0 (invisible) to 255.
    pub alpha: u8,
}

impl Colour {
    /// An opaque colour from `0xRRGGBB`.
    pub const fn hex(rgb: u32) -> Self {
        let [_, r, g, b] = rgb.to_be_bytes();
        Self {
            rgb: [r, g, b],
            alpha: 255,
        }
    }

    /// The same colour with another opacity.
    #[must_use]
    pub const fn with_alpha(self, alpha: u8) -> Self {
        Self { alpha, ..self }
    }
}

/// Which point of a text its position is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

/// One shape. Positions and sizes are in pixels of the SVG, from the upper left corner.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    /// A filled rectangle.
    Rect {
        /// Left, top, width, height.
        area: [f32; 4],
        /// Its colour.
        fill: Colour,
    },
    /// A line through points.
    Line {
        /// Its corners.
        points: Vec<(f32, f32)>,
        /// Its colour.
        stroke: Colour,
        /// Its width.
        width: f32,
        /// Lengths of dash and gap; `None` for a solid line.
        dash: Option<[f32; 2]>,
    },
    /// A filled disc with a white rim.
    Disc {
        /// Its centre.
        centre: (f32, f32),
        /// Its radius, without the rim.
        radius: f32,
        /// Its colour.
        fill: Colour,
    },
    /// One line of text.
    Text {
        /// The anchor, on the base line.
        at: (f32, f32),
        /// Which point that is.
        anchor: Anchor,
        /// The size of the letters.
        size: f32,
        /// Its colour.
        fill: Colour,
        /// True for a text that reads upwards.
        upwards: bool,
        /// The text.
        text: String,
    },
}

/// A picture on a white ground.
#[derive(Debug, Clone, PartialEq)]
pub struct Scene {
    /// Width in pixels.
    pub width: f32,
    /// Height in pixels.
    pub height: f32,
    /// A sentence for those who cannot see the picture.
    pub description: String,
    /// What is drawn, the first at the back.
    pub shapes: Vec<Shape>,
}
