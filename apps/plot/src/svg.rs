//! A scene as SVG text: six kinds of elements, no scripts, no links, no fonts inside.

use std::fmt::Write;

use super::scene::{Anchor, Colour, Scene, Shape};

/// The scene as one SVG document.
pub fn to_svg(scene: &Scene) -> String {
    let mut s = String::with_capacity(64 * 1024);
    let (w, h) = (scene.width, scene.height);
    // Writing into a String cannot fail.
    let _ = writeln!(
        s,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" role=\"img\" \
         font-family=\"Ubuntu, 'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif\">"
    );
    let _ = writeln!(s, "<title>{}</title>", escaped(&scene.description));
    let _ = writeln!(s, "<rect width=\"{w}\" height=\"{h}\" fill=\"#ffffff\"/>");
    for shape in &scene.shapes {
        let _ = match shape {
            Shape::Rect {
                area: [x, y, w, h],
                fill,
            } => writeln!(
                s,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" {}/>",
                paint("fill", *fill)
            ),
            Shape::Line {
                points,
                stroke,
                width,
                dash,
            } => {
                let mut at = String::new();
                for (x, y) in points {
                    let _ = write!(at, "{x:.1},{y:.1} ");
                }
                let dash = dash.map_or(String::new(), |[on, off]| {
                    format!(" stroke-dasharray=\"{on} {off}\"")
                });
                writeln!(
                    s,
                    "<polyline points=\"{}\" fill=\"none\" {} stroke-width=\"{width}\" stroke-linejoin=\"round\"{dash}/>",
                    at.trim_end(),
                    paint("stroke", *stroke)
                )
            }
            Shape::Disc {
                centre: (x, y),
                radius,
                fill,
            } => writeln!(
                s,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" {} stroke=\"#ffffff\" stroke-width=\"1.5\"/>",
                paint("fill", *fill)
            ),
            Shape::Text {
                at: (x, y),
                anchor,
                size,
                fill,
                upwards,
                text,
            } => {
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                let turn = if *upwards {
                    format!(" transform=\"rotate(-90 {x:.1} {y:.1})\"")
                } else {
                    String::new()
                };
                writeln!(
                    s,
                    "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" {}{turn}>{}</text>",
                    paint("fill", *fill),
                    escaped(text)
                )
            }
        };
    }
    s.push_str("</svg>\n");
    s
}

fn paint(attribute: &str, colour: Colour) -> String {
    let [r, g, b] = colour.rgb;
    match colour.alpha {
        255 => format!("{attribute}=\"#{r:02x}{g:02x}{b:02x}\""),
        alpha => format!(
            "{attribute}=\"#{r:02x}{g:02x}{b:02x}\" {attribute}-opacity=\"{:.3}\"",
            f32::from(alpha) / 255.0
        ),
    }
}

/// Text inside an element; characters that XML does not allow at all become spaces.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
