//! Pictures without dependencies: shapes in pixels, axes, and SVG. `oxccl bench --plot` and the training programs draw with it.

mod axis;
mod frame;
mod scene;
mod svg;

pub use axis::{Axis, LogAxis};
pub use frame::{Frame, SMALL};
pub use scene::{Anchor, Colour, Scene, Shape};
pub use svg::to_svg;

/// Colours that lines are told apart by, in the order of use.
pub const CURVES: [Colour; 8] = [
    Colour::hex(0x25_63_eb),
    Colour::hex(0xea_58_0c),
    Colour::hex(0x05_96_69),
    Colour::hex(0x93_33_ea),
    Colour::hex(0x08_91_b2),
    Colour::hex(0xbe_12_3c),
    Colour::hex(0x65_a3_0d),
    Colour::hex(0x47_55_69),
];
/// Text and what stands for data that has no colour of its own.
pub const INK: Colour = Colour::hex(0x1f_29_37);
/// Text of less weight, axes.
pub const SOFT_INK: Colour = Colour::hex(0x6b_72_80);
/// Lines behind the data.
pub const GRID: Colour = Colour::hex(0xe5_e7_eb);
