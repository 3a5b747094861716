//! The files that the command draws into.

use std::path::Path;

use oxccl::core::{Error, Result};
use oxccl_plot::{Scene, to_svg};

/// Checks before anything is measured or computed that `path`, given as `option`, can become a picture.
///
/// Errors: `InvalidArgument` for another ending than `.svg`, a folder, or a folder that does not exist.
pub(crate) fn check(option: &str, path: &Path) -> Result<()> {
    let named = |text: &str| Err(Error::invalid(format!("{option} {}: {text}", path.display())));
    if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg")) {
        return named("pictures are SVG; give the file the ending .svg");
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    if path.is_dir() || folder.is_some_and(|folder| !folder.is_dir()) {
        return named("this is a folder, or it lies in none");
    }
    Ok(())
}

/// Writes the picture. Errors: `Io` naming the file.
pub(crate) fn write(path: &Path, scene: &Scene) -> Result<()> {
    std::fs::write(path, to_svg(scene)).map_err(|e| Error::io(format!("write {}", path.display()), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_svg_files_in_folders_that_exist_are_taken() {
        check("--plot", Path::new("x.svg")).unwrap();
        for (path, text) in [
            ("x.png", ".svg"),
            ("x", ".svg"),
            ("/nowhere-at-all/x.svg", "lies in none"),
        ] {
            let e = check("--plot", Path::new(path)).unwrap_err().to_string();
            assert!(e.contains(text) && e.contains(&format!("--plot {path}")), "{e}");
        }
    }
}
