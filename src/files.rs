//! Reading and writing whole files.

use std::io::Write;
use std::path::{Path, PathBuf};

use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_kernels::store::WholeFile;

use crate::error::{Failure, Result};

/// The text of a file.
///
/// # Errors
/// `C01` for a file that is missing, unreadable or not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| failed(path, &e))
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::io(&path.display().to_string(), error)
}

/// A file as diagnostics show it: its name and its text.
#[derive(Clone, Debug)]
pub struct TextFile {
    name: String,
    /// The text.
    pub text: String,
}

impl TextFile {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// As [`read_text`].
    pub fn read(path: &Path) -> Result<Self> {
        Ok(Self { name: path.display().to_string(), text: read_text(path)? })
    }

    /// The failure for mistakes in the text.
    pub fn refuse(&self, mistakes: Diagnostics) -> Failure {
        let source = Some((self.name.clone(), self.text.clone()));
        Failure { source, ..Failure::from(mistakes) }
    }

    /// The program that the text spells, verified.
    ///
    /// # Errors
    /// The mistakes, with their places.
    pub fn program(&self) -> Result<Module> {
        let module = ithaca_ir::text::parse(&self.text).map_err(|e| self.refuse(e))?;
        ithaca_ir::verify::verify(&module).map_err(|e| self.refuse(e))?;
        Ok(module)
    }
}

/// Writes a file; a reader never sees an incomplete file.
///
/// # Errors
/// `C01` for a folder that does not exist or is not writable.
pub fn write(path: &Path, contents: &[u8]) -> Result<()> {
    check_file(path)?;
    let written = WholeFile::create(path).and_then(|mut file| {
        file.write_all(contents)?;
        file.finish()
    });
    written.map_err(|e| failed(path, &e))
}

/// Checks that a path can be written: it is new, or a file to replace.
///
/// # Errors
/// `C01` for a folder, and for a path in a folder that does not exist or is not writable.
pub fn check_file(path: &Path) -> Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::metadata(folder).map_err(|e| failed(path, &e))?;
    }
    if !path.is_dir() {
        return WholeFile::check(path).map_err(|e| failed(path, &e));
    }
    let message = format!("`{}` is a folder, and the output is a file", path.display());
    Err(Diagnostic::new("C01", message).help("name a file in the folder").into())
}

/// Writes several files into a folder, which is created if needed. All files are written under temporary names first.
///
/// # Errors
/// `C01` for a folder that cannot be created or is not writable.
pub fn write_all(folder: &Path, files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    if folder.is_file() {
        let message = format!("`{}` is a file, and the output is a folder", folder.display());
        return Err(Diagnostic::new("C01", message).help("name another path, as in `-o out/`").into());
    }
    let existed = folder.exists();
    std::fs::create_dir_all(folder).map_err(|e| failed(folder, &e))?;
    let result = write_staged(folder, files);
    if result.is_err() && !existed {
        // The folder was created for this output only.
        let _ = std::fs::remove_dir_all(folder);
    }
    result
}

fn write_staged(folder: &Path, files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    let mut staged = Vec::new();
    for (name, contents) in files {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder).to_owned();
        std::fs::create_dir_all(&parent).map_err(|e| failed(&parent, &e))?;
        let mut file = WholeFile::create(&path).map_err(|e| failed(&path, &e))?;
        file.write_all(contents).map_err(|e| failed(&path, &e))?;
        staged.push((file, path));
    }
    for (file, path) in staged {
        file.finish().map_err(|e| failed(&path, &e))?;
    }
    Ok(())
}
