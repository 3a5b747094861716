//! As much of Python's pickle format (protocol 2) as plain values need: writing only.

/// A value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pickle {
    None,
    Bool(bool),
    Int(i64),
    Text(String),
    List(Vec<Self>),
    /// A tuple of two.
    Pair(Box<[Self; 2]>),
    Dict(Vec<(Self, Self)>),
}

pub(crate) fn text(value: impl Into<String>) -> Pickle {
    Pickle::Text(value.into())
}

pub(crate) fn list(values: Vec<Pickle>) -> Pickle {
    Pickle::List(values)
}

pub(crate) fn tuple(a: Pickle, b: Pickle) -> Pickle {
    Pickle::Pair(Box::new([a, b]))
}

pub(crate) fn dict(fields: Vec<(&'static str, Pickle)>) -> Pickle {
    Pickle::Dict(
        fields
            .into_iter()
            .map(|(name, value)| (text(name), value))
            .collect(),
    )
}

impl Pickle {
    /// The bytes of a file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0x80, 2];
        self.put(&mut out);
        out.push(b'.');
        out
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => out.push(b'N'),
            Self::Bool(true) => out.push(0x88),
            Self::Bool(false) => out.push(0x89),
            Self::Int(n) => match i32::try_from(*n) {
                Ok(n) => {
                    out.push(b'J');
                    out.extend_from_slice(&n.to_le_bytes());
                }
                Err(_) => {
                    out.extend_from_slice(&[0x8a, 8]);
                    out.extend_from_slice(&n.to_le_bytes());
                }
            },
            Self::Text(text) => {
                // The length is of 32 bits; a text that long is cut at a character.
                let end = text.floor_char_boundary(u32::MAX as usize);
                let bytes = text.get(..end).unwrap_or_default().as_bytes();
                out.push(b'X');
                out.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
                out.extend_from_slice(bytes);
            }
            Self::List(values) => {
                out.extend_from_slice(b"](");
                values.iter().for_each(|value| value.put(out));
                out.push(b'e');
            }
            Self::Pair(values) => {
                values.iter().for_each(|value| value.put(out));
                out.push(0x86);
            }
            Self::Dict(entries) => {
                out.extend_from_slice(b"}(");
                for (key, value) in entries {
                    key.put(out);
                    value.put(out);
                }
                out.push(b'u');
            }
        }
    }
}
