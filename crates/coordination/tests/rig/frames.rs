//! HTTP/2 by hand, for peers that do what no client of ours does.

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const HEARTBEAT: &str = "/torchft.LighthouseService/Heartbeat";

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = (payload.len() as u32).to_be_bytes();
    [&[a, b, c, kind, flags][..], &stream.to_be_bytes(), payload].concat()
}

pub(crate) fn greeting(settings: &[u8]) -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, settings)].concat()
}

/// A POST to `path`: literal header fields without Huffman coding.
pub(crate) fn post(path: &str) -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    for (name, value) in [
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        block.extend([0x00, name.len() as u8]);
        block.extend(name.bytes());
        block.push(value.len() as u8);
        block.extend(value.bytes());
    }
    block
}

/// What the pings and settings among whole frames are to be answered with; the frames are taken out.
pub(crate) fn owed(buffer: &mut Vec<u8>) -> Vec<u8> {
    let mut answers = Vec::new();
    while let Some(&[a, b, c, kind, flags]) = buffer.first_chunk::<5>() {
        let len = 9 + (usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c));
        if buffer.len() < len {
            break;
        }
        let whole: Vec<u8> = buffer.drain(..len).collect();
        if kind == 6 && flags & 1 == 0 {
            answers.extend(frame(6, 1, 0, &whole[9..]));
        }
        if kind == SETTINGS && flags & 1 == 0 {
            answers.extend(frame(SETTINGS, 1, 0, &[]));
        }
    }
    answers
}
