//! The real torchft, for the tests of the wire: its wheel from PyPI (2.4 MB), of which only the extension module with its gRPC clients
//! and servers is kept. It needs no torch. There is one wheel for each version of Python.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::python;
use crate::wheels::{self, Place, Wheel};

pub(crate) const VERSION: &str = "0.2.0";
/// Python's minor version, and the hash of its wheel.
const WHEELS: [(u32, &str); 5] = [
    (
        9,
        "efc5674156da64ed8cc7d5ec1fa57099715523eba9b13eb24b53fd55eddcdf0f",
    ),
    (
        10,
        "7be6d504990dfdb5db5ea1ee7e101657d12577266d827738396c846c46e6b36d",
    ),
    (
        11,
        "61be4719c9a96e208fe09f2bf194b51327cd5958278990926e7dea060fe34af9",
    ),
    (
        12,
        "b886da6bc57d706d4dd5ea709873ae8006a38f918799140ff57a3d5415b87fb6",
    ),
    (
        13,
        "6ede2b097ac0c81b419193b708056cd56c0877d6a1310725f9304ded40baabf7",
    ),
];

/// The folder for `OXCCL_TORCHFT_PATH`; made on the first call, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    wheels::needs("python3", "torchft runs in it")?;
    let minor = python::minor_version()?;
    let (_, sha256) = WHEELS
        .into_iter()
        .find(|(m, _)| *m == minor)
        .with_context(|| format!("torchft {VERSION} has no wheel for Python 3.{minor}"))?;
    let place = Place {
        folder: &format!("torchft-{VERSION}-cp3{minor}"),
        recipe: "1",
        notice: "torchft 0.2.0: fetching its wheel (2.4 MB, once)",
    };
    let wheel = Wheel {
        name: "torchft",
        version: VERSION,
        sha256,
    };
    wheels::kept(&place, &wheel, &[".so=_torchft.so"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_python_has_one_wheel_with_a_whole_hash() {
        assert!(WHEELS.windows(2).all(|w| w[0].0 < w[1].0));
        assert!(WHEELS.iter().all(|(_, hash)| hash.len() == 64));
    }
}
