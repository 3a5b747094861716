//! The store of a configuration, seen from the child: its calls go over a socket of their own to the parent's store.
//!
//! `proxy` is the child's [`Store`], `serve` the parent's side. Requests carry a number, so that answers find their callers whatever the order
//! (L39), and a blocked call delays no other. All calls have one form: keys, values and a number, of which each uses what it needs.

pub(crate) mod proxy;
pub(crate) mod serve;

use std::time::Instant;

use ftcore::{Result, Store};

use crate::wire::{Reader, Wire, Writer, odd, record};

/// The calls of a store, in the order of their codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Set,
    Get,
    Add,
    CompareSet,
    Check,
    Wait,
    Delete,
    Append,
    MultiGet,
    MultiSet,
    NumKeys,
    List,
    Barrier,
    /// The child does not use the store any more; no answer.
    Release,
}

const CALLS: [Call; 14] = [
    Call::Set,
    Call::Get,
    Call::Add,
    Call::CompareSet,
    Call::Check,
    Call::Wait,
    Call::Delete,
    Call::Append,
    Call::MultiGet,
    Call::MultiSet,
    Call::NumKeys,
    Call::List,
    Call::Barrier,
    Call::Release,
];

impl Wire for Call {
    fn put(&self, w: &mut Writer) {
        w.u8(*self as u8);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        let code = r.u8()?;
        let call = CALLS.get(usize::from(code)).copied();
        call.ok_or_else(|| odd(format_args!("the unknown store call {code}")))
    }
}

/// One call of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// By which its answer finds the caller.
    pub(crate) number: u64,
    /// Of which of the stores.
    pub(crate) store: u32,
    pub(crate) deadline: Instant,
    pub(crate) call: Call,
    pub(crate) keys: Vec<String>,
    pub(crate) values: Vec<Vec<u8>>,
    /// What is added, or how many take part.
    pub(crate) amount: i64,
}

record!(Request {
    number,
    store,
    deadline,
    call,
    keys,
    values,
    amount,
});

/// What a call gave.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    pub(crate) values: Vec<Vec<u8>>,
    /// A sum, a count, or 1 for yes.
    pub(crate) number: i64,
}

record!(Answer { values, number });

/// The frame of a request, or of an answer and the number of its request.
pub(crate) fn encode(content: &impl Wire) -> Result<Vec<u8>> {
    let mut w = Writer::new(0);
    content.put(&mut w);
    w.finish()
}

/// What is in such a frame.
pub(crate) fn decode<T: Wire>(body: &[u8]) -> Result<T> {
    let mut r = Reader::new(body);
    r.u8()?;
    let content = T::get(&mut r)?;
    r.end()?;
    Ok(content)
}

/// Carries a request out. `Get`, `Wait`, `MultiGet` and `Barrier` block until `deadline`.
pub(crate) fn perform(store: &dyn Store, request: &Request, deadline: Instant) -> Result<Answer> {
    let keys: Vec<&str> = request.keys.iter().map(String::as_str).collect();
    let key = || *keys.first().unwrap_or(&"");
    let value = |at: usize| request.values.get(at).map_or(&[][..], Vec::as_slice);
    let (mut values, mut number) = (Vec::new(), 0);
    match request.call {
        Call::Set => store.set(key(), value(0), deadline)?,
        Call::Get => values.push(store.get(key(), deadline)?),
        Call::Add => number = store.add(key(), request.amount, deadline)?,
        Call::CompareSet => values.push(store.compare_set(key(), value(0), value(1), deadline)?),
        Call::Check => number = store.check(&keys, deadline)?.into(),
        Call::Wait => store.wait(&keys, deadline)?,
        Call::Delete => number = store.delete(key(), deadline)?.into(),
        Call::Append => store.append(key(), value(0), deadline)?,
        Call::MultiGet => values = store.multi_get(&keys, deadline)?,
        Call::MultiSet => {
            let pairs: Vec<(&str, &[u8])> = (keys.iter().copied())
                .zip(request.values.iter().map(Vec::as_slice))
                .collect();
            store.multi_set(&pairs, deadline)?;
        }
        Call::NumKeys => number = store.num_keys(deadline)?,
        Call::List => {
            values = store
                .list(deadline)?
                .into_iter()
                .map(String::into_bytes)
                .collect()
        }
        Call::Barrier => {
            let ranks = u32::try_from(request.amount).map_err(|_| odd("a barrier of that many ranks"))?;
            store.barrier(key(), ranks, deadline)?;
        }
        Call::Release => {}
    }
    Ok(Answer { values, number })
}

#[cfg(test)]
pub(crate) mod tests;
