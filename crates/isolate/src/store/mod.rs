//! The store of a configuration, seen from the child: its calls go over a socket of their own to the parent's store.
//!
//! `proxy` is the child's [`Store`](ftcore::Store), `serve` the parent's side. Requests carry a number, so that answers find
//! their callers whatever the order (L39), and a blocked call delays no other.

pub(crate) mod proxy;
pub(crate) mod serve;

use std::time::Instant;

use ftcore::{Result, Store};

use crate::clock;
use crate::wire::{Reader, Writer, odd};

/// One call of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    Set(String, Vec<u8>),
    Get(String),
    Add(String, i64),
    CompareSet(String, Vec<u8>, Vec<u8>),
    Check(Vec<String>),
    Wait(Vec<String>),
    Delete(String),
    Append(String, Vec<u8>),
    MultiGet(Vec<String>),
    MultiSet(Vec<(String, Vec<u8>)>),
    NumKeys,
    List,
    Barrier(String, u32),
    /// The child does not use the store any more; no answer.
    Release,
}

/// What a call gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Nothing,
    Bytes(Vec<u8>),
    Number(i64),
    Truth(bool),
    Many(Vec<Vec<u8>>),
    Names(Vec<String>),
}

fn name(r: &mut Reader<'_>) -> Result<String> {
    std::str::from_utf8(r.bytes()?)
        .map(str::to_string)
        .map_err(|_| odd("a key that is not UTF-8"))
}

fn names(r: &mut Reader<'_>) -> Result<Vec<String>> {
    (0..r.len()?).map(|_| name(r)).collect()
}

fn put_names(w: &mut Writer, names: &[String]) {
    w.len(names.len());
    names.iter().for_each(|n| w.bytes(n.as_bytes()));
}

/// (number, store, deadline, request).
pub(crate) fn encode(number: u64, store: u32, deadline: Instant, request: &Request) -> Result<Vec<u8>> {
    let begin = |tag| {
        let mut w = Writer::new(tag);
        w.u64(number);
        w.u32(store);
        w.u64(clock::to_wire(deadline));
        w
    };
    let mut w;
    match request {
        Request::Set(k, v) => {
            w = begin(0);
            w.bytes(k.as_bytes());
            w.bytes(v);
        }
        Request::Get(k) => {
            w = begin(1);
            w.bytes(k.as_bytes());
        }
        Request::Add(k, n) => {
            w = begin(2);
            w.bytes(k.as_bytes());
            w.i64(*n);
        }
        Request::CompareSet(k, a, b) => {
            w = begin(3);
            w.bytes(k.as_bytes());
            w.bytes(a);
            w.bytes(b);
        }
        Request::Check(ks) => {
            w = begin(4);
            put_names(&mut w, ks);
        }
        Request::Wait(ks) => {
            w = begin(5);
            put_names(&mut w, ks);
        }
        Request::Delete(k) => {
            w = begin(6);
            w.bytes(k.as_bytes());
        }
        Request::Append(k, v) => {
            w = begin(7);
            w.bytes(k.as_bytes());
            w.bytes(v);
        }
        Request::MultiGet(ks) => {
            w = begin(8);
            put_names(&mut w, ks);
        }
        Request::MultiSet(pairs) => {
            w = begin(9);
            w.len(pairs.len());
            for (k, v) in pairs {
                w.bytes(k.as_bytes());
                w.bytes(v);
            }
        }
        Request::NumKeys => w = begin(10),
        Request::List => w = begin(11),
        Request::Barrier(k, n) => {
            w = begin(12);
            w.bytes(k.as_bytes());
            w.u32(*n);
        }
        Request::Release => w = begin(13),
    }
    w.finish()
}

pub(crate) fn decode(body: &[u8]) -> Result<(u64, u32, Instant, Request)> {
    let mut r = Reader::new(body);
    let tag = r.u8()?;
    let (number, store, deadline) = (r.u64()?, r.u32()?, clock::from_wire(r.u64()?));
    let owned = |r: &mut Reader<'_>| r.bytes().map(<[u8]>::to_vec);
    let request = match tag {
        0 => Request::Set(name(&mut r)?, owned(&mut r)?),
        1 => Request::Get(name(&mut r)?),
        2 => Request::Add(name(&mut r)?, r.i64()?),
        3 => Request::CompareSet(name(&mut r)?, owned(&mut r)?, owned(&mut r)?),
        4 => Request::Check(names(&mut r)?),
        5 => Request::Wait(names(&mut r)?),
        6 => Request::Delete(name(&mut r)?),
        7 => Request::Append(name(&mut r)?, owned(&mut r)?),
        8 => Request::MultiGet(names(&mut r)?),
        9 => {
            let n = r.len()?;
            Request::MultiSet(
                (0..n)
                    .map(|_| Ok((name(&mut r)?, owned(&mut r)?)))
                    .collect::<Result<_>>()?,
            )
        }
        10 => Request::NumKeys,
        11 => Request::List,
        12 => Request::Barrier(name(&mut r)?, r.u32()?),
        13 => Request::Release,
        other => return Err(odd(format_args!("the unknown store call {other}"))),
    };
    r.end()?;
    Ok((number, store, deadline, request))
}

pub(crate) fn encode_answer(number: u64, answer: &Result<Value>) -> Result<Vec<u8>> {
    let mut w = Writer::new(0);
    w.u64(number);
    match answer {
        Err(e) => {
            w.u8(0);
            crate::wire::error::put(&mut w, e);
        }
        Ok(Value::Nothing) => w.u8(1),
        Ok(Value::Bytes(v)) => {
            w.u8(2);
            w.bytes(v);
        }
        Ok(Value::Number(n)) => {
            w.u8(3);
            w.i64(*n);
        }
        Ok(Value::Truth(b)) => {
            w.u8(4);
            w.bool(*b);
        }
        Ok(Value::Many(all)) => {
            w.u8(5);
            w.len(all.len());
            all.iter().for_each(|v| w.bytes(v));
        }
        Ok(Value::Names(all)) => {
            w.u8(6);
            put_names(&mut w, all);
        }
    }
    w.finish()
}

pub(crate) fn decode_answer(body: &[u8]) -> Result<(u64, Result<Value>)> {
    let mut r = Reader::new(body);
    r.u8()?;
    let number = r.u64()?;
    let answer = match r.u8()? {
        0 => Err(crate::wire::error::get(&mut r)?),
        1 => Ok(Value::Nothing),
        2 => Ok(Value::Bytes(r.bytes()?.to_vec())),
        3 => Ok(Value::Number(r.i64()?)),
        4 => Ok(Value::Truth(r.bool()?)),
        5 => {
            let n = r.len()?;
            Ok(Value::Many(
                (0..n)
                    .map(|_| r.bytes().map(<[u8]>::to_vec))
                    .collect::<Result<_>>()?,
            ))
        }
        6 => Ok(Value::Names(names(&mut r)?)),
        other => return Err(odd(format_args!("the unknown store answer {other}"))),
    };
    r.end()?;
    Ok((number, answer))
}

fn refs(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

/// Carries a request out. `Get`, `Wait`, `MultiGet` and `Barrier` block until `deadline`.
pub(crate) fn perform(store: &dyn Store, request: &Request, deadline: Instant) -> Result<Value> {
    Ok(match request {
        Request::Set(k, v) => {
            store.set(k, v, deadline)?;
            Value::Nothing
        }
        Request::Get(k) => Value::Bytes(store.get(k, deadline)?),
        Request::Add(k, n) => Value::Number(store.add(k, *n, deadline)?),
        Request::CompareSet(k, a, b) => Value::Bytes(store.compare_set(k, a, b, deadline)?),
        Request::Check(ks) => Value::Truth(store.check(&refs(ks), deadline)?),
        Request::Wait(ks) => {
            store.wait(&refs(ks), deadline)?;
            Value::Nothing
        }
        Request::Delete(k) => Value::Truth(store.delete(k, deadline)?),
        Request::Append(k, v) => {
            store.append(k, v, deadline)?;
            Value::Nothing
        }
        Request::MultiGet(ks) => Value::Many(store.multi_get(&refs(ks), deadline)?),
        Request::MultiSet(pairs) => {
            let pairs: Vec<(&str, &[u8])> = pairs.iter().map(|(k, v)| (k.as_str(), v.as_slice())).collect();
            store.multi_set(&pairs, deadline)?;
            Value::Nothing
        }
        Request::NumKeys => Value::Number(store.num_keys(deadline)?),
        Request::List => Value::Names(store.list(deadline)?),
        Request::Barrier(k, n) => {
            store.barrier(k, *n, deadline)?;
            Value::Nothing
        }
        Request::Release => Value::Nothing,
    })
}

#[cfg(test)]
mod tests;
