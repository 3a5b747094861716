//! Tests on a machine that is never on time: `fixtures/c/delays.c`, compiled here and preloaded into every program that a test starts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// What is asked for: `seed[,harshness]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wish {
    seed: u32,
    harshness: u32,
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (seed, harshness) = text.split_once(',').unwrap_or((text, "1"));
        let number = |what: &str, text: &str| {
            text.trim()
                .parse::<u32>()
                .map_err(|_| format!("the {what} '{text}' is not a number"))
        };
        let wish = Self {
            seed: number("seed", seed)?,
            harshness: number("harshness", harshness)?,
        };
        match wish.harshness {
            1..=100 => Ok(wish),
            _ => Err("a harshness is 1 to 100".to_owned()),
        }
    }
}

/// The library, and what it is told.
pub(crate) struct Delays {
    library: PathBuf,
    wish: Wish,
}

impl Delays {
    /// Compiles the library into `folder`. Needs a C compiler (`CC`, otherwise `cc`).
    pub(crate) fn build(root: &Path, folder: &Path, wish: Wish) -> Result<Self> {
        let library = folder.join("delays.so");
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let status = Command::new(&cc)
            .args([
                "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared",
            ])
            .arg(root.join("fixtures/c/delays.c"))
            .arg("-o")
            .arg(&library)
            .status()
            .with_context(|| format!("--delays needs a C compiler ('{cc}')"))?;
        if !status.success() {
            bail!("delays.c does not compile ({status})");
        }
        Ok(Self { library, wish })
    }

    /// `command` and whatever it starts are delayed.
    pub(crate) fn apply(&self, command: &mut Command) {
        let Wish { seed, harshness } = self.wish;
        command
            .env("LD_PRELOAD", &self.library)
            .env("OXCCL_TEST_DELAYS", format!("{seed},{harshness}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_is_a_seed_and_perhaps_a_harshness() {
        let wish = |seed, harshness| Ok(Wish { seed, harshness });
        assert_eq!("7".parse::<Wish>(), wish(7, 1));
        assert_eq!("7,3".parse::<Wish>(), wish(7, 3));
        for wrong in ["", "x", "1,", "1,0", "1,101", "1,2,3", "-1"] {
            assert!(wrong.parse::<Wish>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn whatever_a_command_starts_is_delayed_and_does_the_same() {
        let folder = std::env::temp_dir().join(format!("oxccl-delays-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let delays = Delays::build(&root, &folder, "1,2".parse().unwrap()).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "cat /proc/self/maps; head -c 100000 /dev/zero | wc -c"]);
        delays.apply(&mut command);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(said.contains("/delays.so"), "{said}");
        assert_eq!(said.lines().last().map(str::trim), Some("100000"));
    }
}
