//! A state as safetensors bytes, and back.
//!
//! The header is written here rather than by the `safetensors` crate, because its bytes must be a function of the state
//! alone: replicas with equal states then serve equal chunks, and a receiver may mix them. Reading goes through the
//! crate's validation of the header, and copies no tensor: each is a part of the bytes that were read, so that
//! healing needs the memory of one state and not of two.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use ftcore::{DType, Error, ErrorKind, Result};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::{StateDict, StateTensor};
use replica::check_name;

/// Metadata keys with this prefix are the format's own (step, epoch, version); a state may not use them.
pub const RESERVED_METADATA_PREFIX: &str = "oxccl.";

/// What other readers of the format accept at most.
pub(crate) const MAX_HEADER_BYTES: usize = 100_000_000;
pub(crate) const LENGTH_BYTES: usize = 8;

const fn to_file(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
        // `DType` may grow; a new type is an error until it is mapped here.
        _ => return None,
    })
}

fn from_file(dtype: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|d| to_file(*d) == Some(dtype))
}

struct Header<'a> {
    metadata: &'a BTreeMap<&'a str, &'a str>,
    tensors: &'a [(&'a str, TensorInfo)],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry("__metadata__", self.metadata)?;
        }
        for (name, info) in self.tensors {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

/// `state` as the bytes of a safetensors file. Equal states give equal bytes, on every machine.
///
/// Tensors stand in the order of decreasing alignment, then of names. `InvalidArgument` if a tensor does not fit its
/// shape or a metadata key is reserved, `Unsupported` for a dtype that the format does not have, `Unavailable` if
/// there is not enough memory.
pub fn encode(state: &StateDict) -> Result<Vec<u8>> {
    encode_with(state, &BTreeMap::new())
}

/// [`encode`] with the format's own metadata entries; their keys carry [`RESERVED_METADATA_PREFIX`].
pub(crate) fn encode_with(state: &StateDict, own: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let (header, names) = header_of(state, own)?;
    let mut bytes = room_for(header.len().saturating_add(state.total_bytes()))?;
    bytes.extend_from_slice(&header);
    for name in &names {
        let tensor = state.get(name).ok_or_else(lost)?;
        bytes.extend_from_slice(&tensor.data);
    }
    Ok(bytes)
}

/// [`encode_with`] without a copy: the header and, in the order of the file, the data of each tensor.
pub(crate) fn encode_parts(mut state: StateDict, own: &BTreeMap<String, String>) -> Result<Vec<Bytes>> {
    let (header, names) = header_of(&state, own)?;
    let mut parts = Vec::with_capacity(names.len().saturating_add(1));
    parts.push(header.into());
    for name in &names {
        parts.push(state.remove(name).ok_or_else(lost)?.data);
    }
    Ok(parts)
}

fn lost() -> Error {
    Error::new(ErrorKind::Internal, "a tensor of the header is not in the state")
}

/// The beginning of the file, with its length before it, and the names of the tensors in the order of their data.
fn header_of(state: &StateDict, own: &BTreeMap<String, String>) -> Result<(Vec<u8>, Vec<String>)> {
    if let Some(key) = state
        .metadata()
        .keys()
        .find(|k| k.starts_with(RESERVED_METADATA_PREFIX))
    {
        return Err(Error::invalid(format!(
            "metadata key '{key}' is reserved ({RESERVED_METADATA_PREFIX}*)"
        )));
    }
    let metadata: BTreeMap<&str, &str> = state
        .metadata()
        .iter()
        .chain(own)
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();

    let mut ordered = Vec::with_capacity(state.len());
    for (name, tensor) in state.iter() {
        check_name(name)?;
        tensor.check(&format!("tensor '{name}'"))?;
        let dtype = to_file(tensor.dtype).ok_or_else(|| {
            Error::unsupported(format!(
                "tensor '{name}': the file format has no dtype {}",
                tensor.dtype
            ))
        })?;
        ordered.push((dtype, name, tensor));
    }
    // The sort is stable and the names come sorted.
    ordered.sort_by_key(|(dtype, ..)| std::cmp::Reverse(*dtype));

    let mut infos = Vec::with_capacity(ordered.len());
    let mut end = 0usize;
    for (dtype, name, tensor) in &ordered {
        let start = end;
        end = end
            .checked_add(tensor.data.len())
            .ok_or_else(|| Error::invalid("the state is too large"))?;
        let info = TensorInfo {
            dtype: *dtype,
            shape: tensor.shape.clone(),
            data_offsets: (start, end),
        };
        infos.push((*name, info));
    }
    let mut header = serde_json::to_vec(&Header {
        metadata: &metadata,
        tensors: &infos,
    })
    .map_err(|e| Error::new(ErrorKind::Internal, format!("the header of a state: {e}")).with_source(e))?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
    if header.len() > MAX_HEADER_BYTES {
        return Err(Error::invalid(format!(
            "names and metadata take {} bytes, more than the {MAX_HEADER_BYTES} of the file format",
            header.len()
        )));
    }

    let mut bytes = room_for(LENGTH_BYTES.saturating_add(header.len()))?;
    bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&header);
    let names = ordered.iter().map(|(_, name, _)| (*name).to_owned()).collect();
    Ok((bytes, names))
}

pub(crate) fn room_for(bytes: usize) -> Result<Vec<u8>> {
    let mut v = Vec::new();
    v.try_reserve_exact(bytes).map_err(|e| {
        Error::new(
            ErrorKind::Unavailable,
            format!("no memory for {bytes} bytes of state: {e}"),
        )
        .with_source(e)
    })?;
    Ok(v)
}

/// The state in the bytes of a safetensors file, from us or from any other writer.
///
/// Every length is checked against what is there before memory is taken. The tensors are parts of one copy of `bytes`, which is freed with the
/// last of them. `ErrorKind::Corrupt` for a damaged header, offsets that leave gaps or go beyond the end, or bytes left over; `Unsupported`
/// naming the tensor whose dtype is not one of [`DType`]. Reserved metadata is left out of the result.
pub fn decode(bytes: &[u8]) -> Result<StateDict> {
    let (length, rest) = bytes
        .split_first_chunk::<LENGTH_BYTES>()
        .ok_or_else(|| corrupt("a state without a header"))?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let parts = rest
        .split_at_checked(length)
        .filter(|_| length <= MAX_HEADER_BYTES);
    let (header, data) = parts.ok_or_else(|| {
        corrupt(format!(
            "a header of {length} bytes in {} bytes of state (the limit is {MAX_HEADER_BYTES})",
            bytes.len()
        ))
    })?;
    let header = header_before(header, data.len())?;
    let mut copy = room_for(data.len())?;
    copy.extend_from_slice(data);
    state_of(&header, &copy.into()).map(|(state, _)| state)
}

/// A header (without the length before it) that `data_bytes` bytes of tensors follow.
pub(crate) fn header_before(header: &[u8], data_bytes: usize) -> Result<Metadata> {
    // The crate checks shapes, sizes and that offsets follow each other without gap or overlap from 0; that the last
    // one is the end is checked here, without its unchecked addition.
    let header = parsed(header)?;
    if header.data_len() != data_bytes {
        return Err(corrupt(format!(
            "the header describes {} bytes of tensors, {data_bytes} are there",
            header.data_len()
        )));
    }
    Ok(header)
}

/// The state of a header from [`header_before`] and the tensors after it, of which each becomes a part; also gives the reserved metadata.
pub(crate) fn state_of(header: &Metadata, data: &Bytes) -> Result<(StateDict, BTreeMap<String, String>)> {
    let mut state = StateDict::new();
    for name in header.offset_keys() {
        insert(&mut state, header, name, |at| {
            let part = data.get(at).map(|part| data.slice_ref(part));
            part.ok_or_else(|| corrupt("the state ends too early"))
        })?;
    }
    let own = move_metadata(header, &mut state);
    Ok((state, own))
}

fn parsed(header: &[u8]) -> Result<Metadata> {
    serde_json::from_slice(header)
        .map_err(|e| corrupt(format!("the header of the state: {e}")).with_source(e))
}

/// What [`encode_parts`] gave, as a state again and without a copy; also gives the reserved metadata. Errors as
/// [`decode`]: a part that is longer or shorter than the header says is `Corrupt`.
pub(crate) fn decode_whole_parts(parts: Vec<Bytes>) -> Result<(StateDict, BTreeMap<String, String>)> {
    let mut parts = parts.into_iter();
    let head = parts.next().unwrap_or_default();
    let (length, header) = head
        .split_first_chunk::<LENGTH_BYTES>()
        .ok_or_else(|| corrupt("a state without a header"))?;
    if usize::try_from(u64::from_le_bytes(*length)).ok() != Some(header.len())
        || header.len() > MAX_HEADER_BYTES
    {
        return Err(corrupt(format!(
            "a header of {} bytes in a part of {} (the limit is {MAX_HEADER_BYTES})",
            u64::from_le_bytes(*length),
            head.len()
        )));
    }
    let header = parsed(header)?;
    let names = header.offset_keys();
    if names.len() != parts.len() {
        return Err(corrupt(format!(
            "the header describes {} tensors, {} are there",
            names.len(),
            parts.len()
        )));
    }
    let mut state = StateDict::new();
    for (name, data) in names.into_iter().zip(parts) {
        insert(&mut state, &header, name, |at| {
            if data.len() == at.len() {
                return Ok(data);
            }
            let text = format!("a tensor of {} bytes is {} bytes long", at.len(), data.len());
            Err(corrupt(text))
        })?;
    }
    let own = move_metadata(&header, &mut state);
    Ok((state, own))
}

/// Puts the tensor `name` of `header` into `state`; `data` brings what stands at these bytes.
fn insert(
    state: &mut StateDict,
    header: &Metadata,
    name: String,
    data: impl FnOnce(Range<usize>) -> Result<Bytes>,
) -> Result<()> {
    let Some(info) = header.info(&name) else {
        return Ok(());
    };
    let dtype = from_file(info.dtype).ok_or_else(|| {
        Error::unsupported(format!(
            "tensor '{name}' has the dtype {}, which oxccl does not know",
            info.dtype
        ))
    })?;
    let (start, end) = info.data_offsets;
    let tensor = StateTensor {
        dtype,
        shape: info.shape.clone(),
        data: data(start..end)?,
    };
    // A name that is not allowed, seen from the reader, is damage and not a wrong argument.
    state
        .insert(name, tensor)
        .map_err(|e| corrupt(e.message()).with_source(e))
}

/// Gives `state` its metadata and returns the reserved entries.
fn move_metadata(header: &Metadata, state: &mut StateDict) -> BTreeMap<String, String> {
    let mut own = BTreeMap::new();
    for (key, value) in header.metadata().iter().flatten() {
        if key.starts_with(RESERVED_METADATA_PREFIX) {
            own.insert(key.clone(), value.clone());
        } else {
            state.set_metadata(key, value);
        }
    }
    own
}

/// The metadata in a header (without the length before it), the state's own and the reserved entries together.
pub(crate) fn metadata_of(header: &[u8]) -> Result<BTreeMap<String, String>> {
    let header = parsed(header)?;
    let entries = header.metadata().iter().flatten();
    Ok(entries.map(|(k, v)| (k.clone(), v.clone())).collect())
}

pub(crate) fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_tensor() -> impl Strategy<Value = StateTensor> {
        let dims = prop::collection::vec(0usize..5, 0..4);
        (0..DType::ALL.len(), dims).prop_flat_map(|(i, shape)| {
            let dtype = DType::ALL[i];
            let bytes = shape.iter().product::<usize>() * dtype.size();
            prop::collection::vec(any::<u8>(), bytes)
                .prop_map(move |data| StateTensor::new(dtype, shape.clone(), data).unwrap())
        })
    }

    fn any_state() -> impl Strategy<Value = StateDict> {
        let tensors = prop::collection::btree_map("[a-zäß/.\"\\\\]{1,12}", any_tensor(), 0..8);
        let metadata = prop::collection::btree_map("[a-z \n\"]{0,8}", ".{0,20}", 0..4);
        (tensors, metadata).prop_map(|(tensors, metadata)| {
            let mut s = StateDict::new();
            for (n, t) in tensors {
                s.insert(n, t).unwrap();
            }
            for (k, v) in metadata {
                s.set_metadata(k, v);
            }
            s
        })
    }

    proptest! {
        #[test]
        fn a_state_survives_the_round_trip_whole_and_in_parts(s in any_state()) {
            let bytes = encode(&s).unwrap();
            prop_assert_eq!(&decode(&bytes).unwrap(), &s);
            let whole = encode_parts(s.clone(), &BTreeMap::new()).unwrap();
            prop_assert_eq!(&whole.concat(), &bytes);
            prop_assert_eq!(&decode_whole_parts(whole).unwrap().0, &s);
            // Other readers of the format accept it too.
            let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            prop_assert_eq!(theirs.len(), s.len());
        }

        #[test]
        fn every_truncation_and_extension_is_corrupt(s in any_state(), at in any::<prop::sample::Index>()) {
            let mut bytes = encode(&s).unwrap();
            prop_assert_eq!(decode(&bytes[..at.index(bytes.len())]).unwrap_err().kind(), ErrorKind::Corrupt);
            bytes.push(0);
            prop_assert_eq!(decode(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
        }

        #[test]
        fn damaged_bytes_never_panic(s in any_state(), hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut bytes = encode(&s).unwrap();
            let n = bytes.len();
            for (at, value) in hits {
                bytes[at.index(n)] = value;
            }
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn equal_states_give_equal_bytes_whatever_the_order_of_insertion() {
        let names: Vec<String> = (0..40).map(|i| format!("t{i}")).collect();
        let build = |names: &mut dyn Iterator<Item = &String>| {
            let mut s = StateDict::new();
            for n in names {
                s.insert_f32(n.clone(), &[1], &[1.0]).unwrap();
                s.set_metadata(n.clone(), "x");
            }
            encode(&s).unwrap()
        };
        assert_eq!(build(&mut names.iter()), build(&mut names.iter().rev()));
    }

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn bad_headers_are_refused_with_a_reason() {
        let tensor = |dtype: &str, shape: &str, at: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{at}}}}}"#)
        };
        assert!(decode(&file(&tensor("F32", "[2]", "[0,8]"), 8)).is_ok());
        for (header, data, kind, text) in [
            (
                tensor("F32", "[3]", "[0,8]"),
                8,
                ErrorKind::Corrupt,
                "invalid shape",
            ),
            (tensor("F32", "[2]", "[8,0]"), 8, ErrorKind::Corrupt, "offset"),
            (tensor("F32", "[2]", "[4,12]"), 12, ErrorKind::Corrupt, "offset"),
            (
                tensor("F32", "[2]", "[0,8]"),
                9,
                ErrorKind::Corrupt,
                "describes 8 bytes",
            ),
            (
                tensor("F32", "[2]", "[0,8]"),
                0,
                ErrorKind::Corrupt,
                "0 are there",
            ),
            (
                tensor("U8", "[18446744073709551615,2]", "[0,8]"),
                8,
                ErrorKind::Corrupt,
                "overflow",
            ),
            (tensor("F99", "[2]", "[0,8]"), 8, ErrorKind::Corrupt, "F99"),
            (tensor("C64", "[1]", "[0,8]"), 8, ErrorKind::Unsupported, "'a'"),
            (
                tensor("F32", "[2]", "[0,8]").replace("\"a\"", "\"\""),
                8,
                ErrorKind::Corrupt,
                "name",
            ),
            ("[1,2]".into(), 0, ErrorKind::Corrupt, "header"),
        ] {
            let e = decode(&file(&header, data)).unwrap_err();
            assert_eq!(e.kind(), kind, "{header}: {e}");
            assert!(e.to_string().contains(text), "{header}: {e}");
        }
        // Offsets whose sum with the header does not fit a usize.
        let (half, end) = (1usize << 60, usize::MAX);
        let mut parts = Vec::new();
        let mut at = 0usize;
        while at < end {
            let size = half.min(end - at);
            parts.push(format!(
                r#""t{}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{at},{}]}}"#,
                parts.len(),
                at + size
            ));
            at += size;
        }
        let e = decode(&file(&format!("{{{}}}", parts.join(",")), 0)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
        // A header length far beyond the data.
        let e = decode(&[&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
    }

    #[test]
    fn parts_that_are_not_those_of_the_header_are_corrupt() {
        let mut s = StateDict::new();
        s.insert_f32("a", &[2], &[1.0, 2.0]).unwrap();
        s.insert_f32("b", &[3], &[1.0, 2.0, 3.0]).unwrap();
        let good = encode_parts(s, &BTreeMap::new()).unwrap();
        let [head, a, b] = &good[..] else {
            panic!("{good:?}")
        };
        let longer = Bytes::from([head.as_ref(), b" "].concat());
        for bad in [
            vec![],
            vec![head.slice(..7)],
            vec![head.clone(), a.clone()],
            vec![head.clone(), a.clone(), b.clone(), Bytes::new()],
            vec![head.clone(), b.clone(), a.clone()],
            vec![longer, a.clone(), b.clone()],
        ] {
            let e = decode_whole_parts(bad).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
        }
    }

    #[test]
    fn reserved_metadata_is_refused_from_the_caller() {
        let mut s = StateDict::new();
        s.set_metadata("oxccl.step", "3");
        assert_eq!(encode(&s).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
