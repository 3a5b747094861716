//! The kernels compiled by the real NVRTC for the chips that are named in the documentation, which takes no GPU: the row `cuda-kernels`.
//! Every trial is ignored with the reason where NVRTC is not found.

use std::process::ExitCode;

use ftcore::ErrorKind;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use oxccl_quant_cuda::compile;

const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90", "sm_100"];

fn main() -> ExitCode {
    let mut trials: Vec<Trial> = ARCHITECTURES
        .map(|architecture| {
            Trial::ignorable_test(format!("compiles_for_{architecture}"), || compiles(architecture))
        })
        .into();
    trials.push(Trial::ignorable_test(
        "an_unknown_architecture_is_unsupported_by_name",
        unknown,
    ));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Machine code, or why there is no compiler.
fn compiled(architecture: &str) -> Result<Result<Vec<u8>, ftcore::Error>, Completion> {
    match compile(architecture) {
        Ok((code, _)) => Ok(Ok(code)),
        Err(e) if e.kind() == ErrorKind::Unsupported && e.to_string().contains("was not found") => {
            Err(Completion::ignored_with(e.to_string()))
        }
        Err(e) => Ok(Err(e)),
    }
}

fn compiles(architecture: &str) -> Result<Completion, Failed> {
    let code = match compiled(architecture) {
        Ok(code) => code?,
        Err(ignored) => return Ok(ignored),
    };
    if !code.starts_with(b"\x7fELF") {
        return Err(format!("{} bytes that are no machine code", code.len()).into());
    }
    for kernel in ["ox_encode_int8_b64", "ox_decode_add_mx_e4m3", "ox_narrow_bf16"] {
        if !code.windows(kernel.len()).any(|w| w == kernel.as_bytes()) {
            return Err(format!("the machine code has no {kernel}").into());
        }
    }
    Ok(Completion::Completed)
}

fn unknown() -> Result<Completion, Failed> {
    match compiled("sm_1") {
        Err(ignored) => Ok(ignored),
        Ok(Ok(_)) => Err("it compiled".into()),
        Ok(Err(e)) if e.kind() == ErrorKind::Unsupported && e.to_string().contains("sm_1") => {
            Ok(Completion::Completed)
        }
        Ok(Err(e)) => Err(e.to_string().into()),
    }
}
