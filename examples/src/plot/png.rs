//! A scene as PNG, drawn at twice its size so that it is sharp on dense screens.

use ftcore::{Error, ErrorKind, Result};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, StrokeDash, Transform,
};
use ttf_parser::OutlineBuilder;

use super::{Anchor, Colour, Font, Scene, Shape};

const SCALE: f32 = 2.0;

/// The scene as the bytes of a PNG file, 2 × width by 2 × height pixels.
pub fn to_png(scene: &Scene, font: &Font) -> Result<Vec<u8>> {
    // Sizes are a few thousand pixels at most; a scene without area is refused by `new`.
    let (w, h) = (
        (scene.width * SCALE).round() as u32,
        (scene.height * SCALE).round() as u32,
    );
    let mut map = Pixmap::new(w, h)
        .ok_or_else(|| Error::invalid(format!("a picture of {w} by {h} pixels cannot be drawn")))?;
    map.fill(Color::WHITE);
    let whole = Transform::from_scale(SCALE, SCALE);
    for shape in &scene.shapes {
        match shape {
            Shape::Rect {
                area: [x, y, w, h],
                fill,
            } => {
                if let Some(rect) = Rect::from_xywh(*x, *y, *w, *h) {
                    map.fill_rect(rect, &paint(*fill), whole, None);
                }
            }
            Shape::Line {
                points,
                stroke,
                width,
                dash,
            } => {
                if let Some(path) = polyline(points) {
                    let stroke_style = Stroke {
                        width: *width,
                        line_cap: LineCap::Butt,
                        line_join: LineJoin::Round,
                        dash: dash.and_then(|d| StrokeDash::new(d.to_vec(), 0.0)),
                        ..Stroke::default()
                    };
                    map.stroke_path(&path, &paint(*stroke), &stroke_style, whole, None);
                }
            }
            Shape::Disc {
                centre: (x, y),
                radius,
                fill,
            } => {
                if let Some(path) = PathBuilder::from_circle(*x, *y, *radius) {
                    map.fill_path(&path, &paint(*fill), FillRule::Winding, whole, None);
                    let rim = Stroke {
                        width: 1.5,
                        ..Stroke::default()
                    };
                    map.stroke_path(&path, &paint(Colour::hex(0xff_ff_ff)), &rim, whole, None);
                }
            }
            Shape::Text {
                at: (x, y),
                anchor,
                size,
                fill,
                upwards,
                text,
            } => {
                let width = font.width(text, *size);
                let start = match anchor {
                    Anchor::Start => 0.0,
                    Anchor::Middle => -width / 2.0,
                    Anchor::End => -width,
                };
                let mut place = whole.pre_translate(*x, *y);
                if *upwards {
                    place = place.pre_concat(Transform::from_rotate(-90.0));
                }
                if let Some(path) = outline(font, text, start, *size) {
                    map.fill_path(&path, &paint(*fill), FillRule::Winding, place, None);
                    // The typeface is a light one: a hair of stroke makes small letters readable.
                    let hair = Stroke {
                        width: size * 0.022,
                        ..Stroke::default()
                    };
                    map.stroke_path(&path, &paint(*fill), &hair, place, None);
                }
            }
        }
    }
    map.encode_png()
        .map_err(|e| Error::new(ErrorKind::Internal, format!("encode the picture as PNG: {e}")))
}

fn paint(colour: Colour) -> Paint<'static> {
    let [r, g, b] = colour.rgb;
    let mut paint = Paint::default();
    paint.set_color_rgba8(r, g, b, colour.alpha);
    paint.anti_alias = true;
    paint
}

fn polyline(points: &[(f32, f32)]) -> Option<Path> {
    let ((x, y), rest) = points.split_first()?;
    let mut path = PathBuilder::new();
    path.move_to(*x, *y);
    for (x, y) in rest {
        path.line_to(*x, *y);
    }
    path.finish()
}

/// The letters of `text` with the base line at y = 0, the first one at x = `start`. `None` if nothing is visible.
fn outline(font: &Font, text: &str, start: f32, size: f32) -> Option<Path> {
    let mut pen = Pen {
        path: PathBuilder::new(),
        x: start,
        scale: size / f32::from(font.0.units_per_em()),
    };
    for c in text.chars() {
        if let Some(glyph) = font.0.glyph_index(c) {
            font.0.outline_glyph(glyph, &mut pen);
        }
        pen.x += font.advance(c) * size;
    }
    pen.path.finish()
}

/// Puts the outline of one glyph (y upwards, font units) into the path (y downwards, pixels).
struct Pen {
    path: PathBuilder,
    x: f32,
    scale: f32,
}

impl Pen {
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + x * self.scale, -y * self.scale)
    }
}

impl OutlineBuilder for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}
