//! Reading and writing whole files.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_kernels::store::WholeFile;

use crate::error::{Failure, Result};

/// The largest text, plan or program, bytes.
pub const MAX_TEXT: u64 = 256 << 20;

/// The largest configuration, cluster file or file of rules, bytes.
pub const MAX_SMALL: u64 = 16 << 20;

/// The path that stands for standard input.
const STANDARD_INPUT: &str = "-";

/// Whether a path stands for standard input.
pub fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == STANDARD_INPUT
}

/// The text of a file of at most [`MAX_TEXT`] bytes, or of standard input for the path `-`.
///
/// # Errors
/// `C01` for a file that is missing, unreadable, too large or not UTF-8, and for a device or a pipe.
pub fn read_text(path: &Path) -> Result<String> {
    read_within(path, MAX_TEXT)
}

/// As [`read_text`], of at most `most` bytes.
///
/// # Errors
/// As [`read_text`].
pub fn read_within(path: &Path, most: u64) -> Result<String> {
    let mut text = String::new();
    let read = |from: &mut dyn Read, text: &mut String| {
        from.take(most + 1).read_to_string(text).map_err(|e| failed(path, &e))
    };
    let n = if is_standard_input(path) {
        read(&mut std::io::stdin().lock(), &mut text)?
    } else {
        // A device may have no end, and a pipe may wait for its writer when it is opened.
        let about = std::fs::metadata(path).map_err(|e| failed(path, &e))?;
        if !about.is_file() && !about.is_dir() {
            return Err(no_file(path));
        }
        let mut file = File::open(path).map_err(|e| failed(path, &e))?;
        read(&mut file, &mut text)?
    };
    if n as u64 <= most {
        return Ok(text);
    }
    let message = format!("`{}` has more than {} MiB, the most that is read", path.display(), most >> 20);
    Err(Diagnostic::new("C01", message).into())
}

/// The refusal of a device or a pipe.
pub fn no_file(path: &Path) -> Failure {
    let message = format!("`{}` is a device or a pipe, and not a file", path.display());
    Diagnostic::new("C01", message).help("name a file, or `-` for standard input").into()
}

/// The refusal of a path that cannot be read or written; of one that does not exist with the nearest name of its folder.
pub fn failed(path: &Path, error: &std::io::Error) -> Failure {
    let mut failure = Failure::io(&path.display().to_string(), error);
    let near = (error.kind() == std::io::ErrorKind::NotFound).then(|| neighbour(path)).flatten();
    let diagnostic = failure.diagnostics.first_mut().zip(near);
    diagnostic.into_iter().for_each(|(d, near)| d.helps.push(format!("did you mean `{}`?", near.display())));
    failure
}

/// The path in the same folder whose name is nearest.
fn neighbour(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = std::fs::read_dir(folder.unwrap_or(Path::new("."))).ok()?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    let near = nearest(path.file_name()?.to_str()?, names.iter().map(String::as_str))?;
    Some(path.with_file_name(near))
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
        Self::read_within(path, MAX_TEXT)
    }

    /// Reads the file at `path`, of at most `most` bytes.
    ///
    /// # Errors
    /// As [`read_text`].
    pub fn read_within(path: &Path, most: u64) -> Result<Self> {
        Ok(Self { name: path.display().to_string(), text: read_within(path, most)? })
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

/// Writes several files into a folder, which is created if needed. All files are written under temporary names first; where one
/// cannot be written, nothing is changed.
///
/// # Errors
/// `C01` for a folder that cannot be created or is not writable, for a file that is in the way, and for a link that leads out of
/// the folder.
pub fn write_all(folder: &Path, files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    if folder.is_file() {
        let message = format!("`{}` is a file, and the output is a folder", folder.display());
        return Err(Diagnostic::new("C01", message).help("name another path, as in `-o out/`").into());
    }
    for (name, _) in files {
        check_inside(folder, &folder.join(name))?;
    }
    let mut created = Vec::new();
    let result = write_staged(folder, files, &mut created);
    if result.is_err() {
        // Those that have files of others meanwhile stay.
        created.iter().rev().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
    result
}

/// Checks that a file of a folder can be written there, as far as the path exists.
fn check_inside(folder: &Path, path: &Path) -> Result<()> {
    let there = path.ancestors().find(|path| path.symlink_metadata().is_ok());
    let Some(there) = there.filter(|there| there.starts_with(folder) && *there != folder) else {
        return Ok(());
    };
    // A link to nothing leads somewhere too.
    let inside = std::fs::canonicalize(folder).and_then(|folder| Ok((folder, std::fs::canonicalize(there)?)));
    let problem = match inside {
        Ok((folder, place)) if !place.starts_with(&folder) => "is a link that leads out of the folder",
        Ok((_, place)) if there == path && place.is_dir() => "is a folder, where a file is to be written",
        Ok((_, place)) if there != path && !place.is_dir() => "is a file, where a folder is to be",
        Ok(_) => return Ok(()),
        Err(_) => "is a link that leads nowhere",
    };
    let message = format!("`{}` {problem}", there.display());
    Err(Diagnostic::new("C01", message).help("remove it, or name another folder").into())
}

/// Creates a folder and those above it, and notes which.
fn create_folder(folder: &Path, created: &mut Vec<PathBuf>) -> Result<()> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        create_folder(parent, created)?;
    }
    std::fs::create_dir(folder).map_err(|e| failed(folder, &e))?;
    created.push(folder.to_owned());
    Ok(())
}

fn write_staged(folder: &Path, files: &[(PathBuf, Vec<u8>)], created: &mut Vec<PathBuf>) -> Result<()> {
    let mut staged = Vec::new();
    for (name, contents) in files {
        let path = folder.join(name);
        create_folder(path.parent().unwrap_or(folder), created)?;
        let mut file = WholeFile::create(&path).map_err(|e| failed(&path, &e))?;
        file.write_all(contents).map_err(|e| failed(&path, &e))?;
        staged.push((file, path));
    }
    for (file, path) in staged {
        file.finish().map_err(|e| failed(&path, &e))?;
    }
    Ok(())
}
