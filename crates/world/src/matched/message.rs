//! What is known of a message, and what its ends say of it to each other.

use ftcore::{Collective, Error, ErrorKind, Result, Tensor, Work};

/// What one end says of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) count: u64,
    pub(super) dtype: u8,
    pub(super) member: u64,
}

/// An envelope, or an answer: the number of the message, and what that end says of it.
pub(super) const WORDS: usize = 4;

pub(super) fn words(number: u64, content: Content) -> Tensor {
    let Content { count, dtype, member } = content;
    Tensor::from_vec(vec![number, count, u64::from(dtype), member])
}

/// The rank that sent it, the number, and what that rank says. Takes the result of `work`.
pub(super) fn read(work: &Work) -> Result<(u32, u64, Content)> {
    let done = work.take()?;
    let (source, tensor) = (done.source, done.into_tensor()?);
    match (source, tensor.as_slice::<u64>()?) {
        (Some(source), &[number, count, dtype, member]) => {
            let dtype = u8::try_from(dtype).unwrap_or(u8::MAX);
            let content = Content { count, dtype, member };
            Ok((source, number, content))
        }
        _ => Err(Error::new(ErrorKind::Protocol, "an envelope of another form")),
    }
}

pub(super) struct Part {
    /// Not while the library has it.
    pub(super) tensor: Option<Tensor>,
    pub(super) send: bool,
    pub(super) peer: Option<u32>,
    pub(super) tag: u32,
    pub(super) content: Content,
    pub(super) over: bool,
}

impl Part {
    pub(super) fn of(op: Collective, member: usize) -> Option<Self> {
        let (tensor, send, peer, tag) = match op {
            Collective::Send { tensor, peer, tag } => (tensor, true, Some(peer), tag),
            Collective::Recv { tensor, peer, tag } => (tensor, false, peer, tag),
            _ => return None,
        };
        let content = Content {
            count: tensor.count() as u64,
            dtype: tensor.dtype().code(),
            member: member as u64,
        };
        Some(Self {
            tensor: Some(tensor),
            send,
            peer,
            tag,
            content,
            over: false,
        })
    }
}
