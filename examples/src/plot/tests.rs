use super::*;

/// A run as one would meet it: two replicas, one killed in the middle, marks close together.
fn picture() -> Picture {
    let curve = |from: f64, to: f64, seed: u64| -> Vec<(f64, f64)> {
        let mut state = seed;
        let mut noise = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
        };
        let n = ((to - from) / 0.25) as usize;
        (0..n)
            .map(|i| from + i as f64 * 0.25)
            .map(|t| (t, 1.6 + 3.9 * (-t / 22.0).exp() + 0.25 * noise()))
            .collect()
    };
    Picture {
        title: "train_diloco: training loss".into(),
        subtitle: "2 replicas, 0.92 M parameters, 150 s  ·  held-out loss 1.734  ·  longest stall of a survivor 312 ms"
            .into(),
        series: vec![
            Series { label: "replica 0".into(), parts: vec![curve(1.0, 66.0, 1), curve(66.6, 150.0, 2)] },
            Series { label: "replica 1".into(), parts: vec![curve(1.0, 66.0, 3), curve(70.0, 150.0, 4)] },
        ],
        held_out: Some((151.0, 1.734)),
        stalls: vec![(65.8, 66.6)],
        marks: vec![
            Mark { at_s: 66.0, kind: MarkKind::Death, label: "replica 1 killed (SIGKILL)".into() },
            Mark { at_s: 66.5, kind: MarkKind::Restart, label: "replica 1 restarted".into() },
            Mark { at_s: 71.0, kind: MarkKind::Recovery, label: "replica 1 healed, first commit after 4.5 s".into() },
        ],
    }
}

fn marks_at(at: &[f64]) -> Vec<Mark> {
    at.iter()
        .map(|&at_s| Mark {
            at_s,
            kind: MarkKind::Death,
            label: "replica 1 killed (SIGKILL)".into(),
        })
        .collect()
}

/// Left, top, right, bottom.
type Box4 = [f32; 4];
/// Position, top, bottom.
type Upright = (f32, f32, f32);

/// The rectangles of all label texts, the upright lines of all marks, and the width of the picture.
fn labels(picture: &Picture) -> (Vec<Box4>, Vec<Upright>, f32) {
    let font = Font::load().unwrap();
    let scene = picture.to_scene(&font);
    let names: Vec<&str> = picture.marks.iter().map(|m| m.label.as_str()).collect();
    let mut boxes = Vec::new();
    let mut lines = Vec::new();
    for shape in &scene.shapes {
        match shape {
            Shape::Text {
                at: (x, y),
                anchor,
                size,
                text,
                ..
            } if names.contains(&text.as_str()) => {
                let w = font.width(text, *size);
                let left = if *anchor == Anchor::End { x - w } else { *x };
                boxes.push([left, y - size, left + w, *y]);
            }
            Shape::Line {
                points,
                dash: Some(_),
                ..
            } => lines.push((points[0].0, points[0].1, points[1].1)),
            _ => {}
        }
    }
    (boxes, lines, scene.width)
}

#[test]
fn labels_never_overlap_each_other_nor_the_lines_of_others_nor_leave_the_picture() {
    let mut pictures = vec![picture()];
    for at in [
        vec![0.0],
        vec![20.0, 60.0, 100.0, 150.0],
        vec![150.0, 149.9, 149.0, 140.0, 100.0],
        vec![10.0, 10.0, 10.0],
        (0..150).map(f64::from).collect(),
        (0..15).map(|i| f64::from(i) * 10.0).collect(),
        (0..12).map(|i| 150.0 - f64::from(i) * 3.0).collect(),
    ] {
        pictures.push(Picture {
            marks: marks_at(&at),
            ..picture()
        });
    }
    for picture in pictures {
        let (boxes, lines, width) = labels(&picture);
        // A few marks all have their labels; of dozens some do without.
        let enough = if picture.marks.len() <= 5 {
            picture.marks.len()
        } else {
            5
        };
        assert!(
            boxes.len() >= enough,
            "{} labels for {:?}",
            boxes.len(),
            picture.marks
        );
        for (i, a) in boxes.iter().enumerate() {
            assert!(a[0] >= 0.0 && a[2] <= width, "{a:?} leaves the picture");
            for b in &boxes[i + 1..] {
                let apart = a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1];
                assert!(apart, "{a:?} and {b:?} overlap in {:?}", picture.marks);
            }
            for (x, top, bottom) in &lines {
                let crosses = *x > a[0] && *x < a[2] && *top < a[3] && *bottom > a[1];
                assert!(!crosses, "the line at {x} crosses {a:?} in {:?}", picture.marks);
            }
        }
    }
}

#[test]
fn both_files_are_valid_and_show_the_same_picture() {
    let dir = tempfile::tempdir().unwrap();
    let [svg, png] = picture().write(dir.path(), "loss").unwrap();
    let svg = std::fs::read_to_string(svg).unwrap();
    well_formed(&svg);
    for wanted in [
        "replica 1 killed (SIGKILL)",
        "held-out loss at the end",
        "seconds since the start",
        "<title>",
    ] {
        assert!(svg.contains(wanted), "{wanted} is missing");
    }
    let png = std::fs::read(png).unwrap();
    let map = tiny_skia::Pixmap::decode_png(&png).unwrap();
    let scene = picture().to_scene(&Font::load().unwrap());
    assert_eq!(
        (map.width(), map.height()),
        ((2.0 * scene.width) as u32, (2.0 * scene.height).round() as u32)
    );
    // Something of every curve's colour was drawn.
    for colour in [0x25_63_ebu32, 0xea_58_0c] {
        let [_, r, g, b] = colour.to_be_bytes();
        assert!(
            map.pixels()
                .iter()
                .filter(|p| (p.red(), p.green(), p.blue()) == (r, g, b))
                .count()
                > 500
        );
    }
}

/// Every element is closed in order, and attributes are quoted: what an XML parser insists on, for the few forms used.
fn well_formed(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        assert!(
            !rest[..at].contains('>'),
            "a stray > before {}",
            &rest[at..at + 20]
        );
        let end = at + rest[at..].find('>').unwrap();
        let tag = &rest[at + 1..end];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else {
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && rest.trim().is_empty());
}

#[test]
fn hostile_text_stays_text() {
    let picture = Picture {
        title: "<script>&\"\u{0}]]>".into(),
        ..picture()
    };
    let svg = to_svg(&picture.to_scene(&Font::load().unwrap()));
    well_formed(&svg);
    assert!(
        svg.contains("&lt;script&gt;&amp;&quot; ]]&gt;") && !svg.contains("<script"),
        "{}",
        &svg[..600]
    );
}

#[test]
fn an_empty_run_and_losses_that_are_not_finite_still_make_a_picture() {
    let empty = Picture {
        series: vec![],
        held_out: None,
        stalls: vec![],
        marks: vec![],
        ..picture()
    };
    let part = vec![(1.0, 2.0), (2.0, f64::NAN), (3.0, f64::INFINITY), (4.0, 2.0)];
    let odd = Picture {
        series: vec![Series {
            label: "replica 0".into(),
            parts: vec![vec![], vec![(1.0, 1.0)], part],
        }],
        held_out: Some((5.0, f64::NAN)),
        ..empty.clone()
    };
    let font = Font::load().unwrap();
    for picture in [empty, odd] {
        let scene = picture.to_scene(&font);
        let svg = to_svg(&scene);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(to_png(&scene, &font).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));
    }
}

#[test]
fn ticks_are_round_and_within_the_axis() {
    for (low, high) in [
        (0.0, 1.0),
        (0.0, 153.2),
        (1.43, 5.71),
        (-0.3, 0.02),
        (0.0, 1e7),
        (2.0, 2.001),
    ] {
        let axis = Axis::new(low, high, 0.0, 100.0, 8);
        let ticks = axis.ticks();
        assert!((3..=14).contains(&ticks.len()), "{low}..{high}: {ticks:?}");
        assert!(
            ticks.iter().all(|t| *t >= low - 1e-9 && *t <= high + 1e-9),
            "{low}..{high}: {ticks:?}"
        );
        let labels: std::collections::BTreeSet<String> = ticks.iter().map(|t| axis.label(*t)).collect();
        assert_eq!(labels.len(), ticks.len(), "labels are distinct: {labels:?}");
    }
}

#[test]
fn thinning_keeps_the_peaks() {
    let mut points: Vec<(f64, f64)> = (0..50_000).map(|i| (f64::from(i), 1.0)).collect();
    points[31_234].1 = 9.0;
    let thin = thinned(&points);
    assert!(thin.len() <= 2002 && thin.contains(&(31_234.0, 9.0)));
    assert!(thin.windows(2).all(|w| w[0].0 < w[1].0));
}
