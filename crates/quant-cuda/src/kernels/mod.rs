//! The kernels of one device, compiled at the first use and kept.

pub(crate) mod nvrtc;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use backend_nccl::CudaProgram;
use ftcore::{DType, Error, Result, Tensor};
use quant::{Codec, Encoding, Rounding};

pub(crate) const SOURCE: &str = include_str!("quantise.cu");

/// Values that a warp works on at least.
const PER_THREAD: usize = 2;

const NAMES: [&str; 14] = [
    "ox_encode_int8_b64",
    "ox_encode_int8_b32",
    "ox_encode_mx_e4m3",
    "ox_decode_int8_b64",
    "ox_decode_int8_b32",
    "ox_decode_mx_e4m3",
    "ox_decode_add_int8_b64",
    "ox_decode_add_int8_b32",
    "ox_decode_add_mx_e4m3",
    "ox_divide",
    "ox_widen_f16",
    "ox_widen_bf16",
    "ox_narrow_f16",
    "ox_narrow_bf16",
];

/// A format's part of the kernels' names.
pub(crate) fn known(codec: Codec) -> Option<&'static str> {
    match codec {
        Codec::Int8B64 => Some("int8_b64"),
        Codec::Int8B32 => Some("int8_b32"),
        Codec::MxE4M3 => Some("mx_e4m3"),
        _ => None,
    }
}

fn name_of(codec: Codec) -> Result<&'static str> {
    known(codec).ok_or_else(|| Error::unsupported(format!("{codec} has no kernels for CUDA devices")))
}

/// The kernels on one device.
pub(crate) struct Kernels {
    pub(crate) program: CudaProgram,
    /// How many values were not finite; one call at a time.
    odd: Mutex<Tensor>,
}

impl Kernels {
    /// Those of device `index`. A failure is not kept: a library may be installed.
    pub(crate) fn on(index: u32) -> Result<Arc<Self>> {
        static ALL: Mutex<Option<HashMap<u32, Arc<Kernels>>>> = Mutex::new(None);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_with(HashMap::new);
        if let Some(kernels) = all.get(&index) {
            return Ok(kernels.clone());
        }
        let (major, minor) = CudaProgram::capability(index)?;
        let nvrtc = nvrtc::get()?;
        let code = nvrtc.compile(SOURCE, &format!("sm_{major}{minor}"))?;
        tracing::debug!(device = index, bytes = code.len(), compiler = %nvrtc.describe(), "kernels for quantising were compiled");
        // SAFETY: compiled for this device just now.
        let program = unsafe { CudaProgram::load(index, &code, &NAMES) }?;
        let odd = program.alloc(DType::I32, 1)?;
        let kernels = Arc::new(Self {
            program,
            odd: Mutex::new(odd),
        });
        all.insert(index, kernels.clone());
        Ok(kernels)
    }

    /// Encodes `range` of the f32 tensor `values` to byte `at` of `to`; how many are not finite.
    pub(crate) fn encode(
        &self,
        codec: Codec,
        how: Encoding,
        (values, range): (&Tensor, &Range<usize>),
        (to, at): (&mut Tensor, usize),
    ) -> Result<usize> {
        let name = name_of(codec)?;
        let from = within(values, range)?;
        fits(to, at, codec.encoded_len(range.len()))?;
        if range.is_empty() {
            return Ok(0);
        }
        let mut odd = self.odd.lock().unwrap_or_else(PoisonError::into_inner);
        self.program.clear(&mut odd)?;
        let (stochastic, key) = match how.rounding {
            Rounding::Nearest => (0, 0),
            Rounding::Stochastic { key } => (1, key),
        };
        let mut words = [
            from,
            to.as_mut_ptr() as u64 + at as u64,
            range.len() as u64,
            how.first,
            key,
            stochastic,
            odd.as_mut_ptr() as u64,
        ];
        self.run(&format!("ox_encode_{name}"), range.len() / PER_THREAD, &mut words)?;
        let mut count = [0; 4];
        self.program.read(&mut [(&odd, 0, &mut count)])?;
        Ok(u32::from_ne_bytes(count) as usize)
    }

    /// Decodes what begins at byte `at` of `bytes` into `range` of the f32 tensor `values`, or adds to it.
    pub(crate) fn decode(
        &self,
        codec: Codec,
        (bytes, at): (&Tensor, usize),
        add: bool,
        (values, range): (&mut Tensor, &Range<usize>),
    ) -> Result<()> {
        let name = name_of(codec)?;
        fits(bytes, at, codec.encoded_len(range.len()))?;
        let to = within(values, range)?;
        let verb = if add { "decode_add" } else { "decode" };
        let mut words = [bytes.as_ptr() as u64 + at as u64, to, range.len() as u64];
        self.run(&format!("ox_{verb}_{name}"), range.len() / PER_THREAD, &mut words)
    }

    /// Divides `range` of the f32 tensor `values`.
    pub(crate) fn divide(&self, values: &mut Tensor, range: &Range<usize>, divisor: f32) -> Result<()> {
        let mut words = [
            within(values, range)?,
            range.len() as u64,
            u64::from(divisor.to_bits()),
        ];
        self.run("ox_divide", range.len(), &mut words)
    }

    /// Widens `range` of `from` (f16 or bf16) to the f32 at element `at` of `to`.
    pub(crate) fn widen(
        &self,
        from: &Tensor,
        range: &Range<usize>,
        (to, at): (&mut Tensor, usize),
    ) -> Result<()> {
        let mut words = [
            within(from, range)?,
            within(to, &(at..at.saturating_add(range.len())))?,
            range.len() as u64,
        ];
        self.run(&format!("ox_widen_{}", from.dtype()), range.len(), &mut words)
    }

    /// Rounds the f32 from element `at` of `from` on into `range` of `to` (f16 or bf16).
    pub(crate) fn narrow(
        &self,
        (from, at): (&Tensor, usize),
        to: &mut Tensor,
        range: &Range<usize>,
    ) -> Result<()> {
        let mut words = [
            within(from, &(at..at.saturating_add(range.len())))?,
            within(to, range)?,
            range.len() as u64,
        ];
        self.run(&format!("ox_narrow_{}", to.dtype()), range.len(), &mut words)
    }

    /// Launches a kernel and waits for it. The words are addresses of tensors that the callers here borrow, and counts that were checked to
    /// fit them.
    fn run(&self, kernel: &str, threads: usize, words: &mut [u64]) -> Result<()> {
        // SAFETY: each call above gives the words of its kernel in `quantise.cu`, for memory that it borrows until `finish`.
        let launched = unsafe { self.program.launch(kernel, threads.max(1), words) };
        self.program.finish().and(launched)
    }
}

/// The address of the first element of `range`.
fn within(tensor: &Tensor, range: &Range<usize>) -> Result<u64> {
    if range.start <= range.end && range.end <= tensor.count() {
        let offset = range.start * tensor.dtype().size();
        return Ok(tensor.as_ptr() as u64 + offset as u64);
    }
    Err(Error::invalid(format!(
        "elements {} to {} of a tensor of {}",
        range.start,
        range.end,
        tensor.count()
    )))
}

fn fits(bytes: &Tensor, at: usize, length: usize) -> Result<()> {
    if at.checked_add(length).is_some_and(|end| end <= bytes.byte_len()) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{length} bytes from {at} on of a tensor of {} bytes",
        bytes.byte_len()
    )))
}
