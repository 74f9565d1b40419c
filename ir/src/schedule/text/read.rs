//! Parses schedules.

use std::collections::HashMap;

use crate::diagnostic::{Diagnostics, Span};
use crate::entity::{Arena, Entity};
use crate::handles::Layers;
use crate::message::Parcel;
use crate::ops::attr::{Attr, Attrs, Names, NoFunctions};
use crate::ops::attribute::Attribute;
use crate::ops::table::op::Op;
use crate::ops::table::source::Binding;
use crate::schedule::{
    Buffer, BufferId, Content, EventId, Frame, FrameId, FrameOutput, Place, Schedule, Stream, Task, Transfer,
    Work,
};
use crate::text::cursor::{Cursor, Parsed, mistake, unknown};
use crate::text::grammar::{
    Header, Named, make_op, read_attrs, read_dtype, read_header, read_outputs, read_phase, read_type, twice,
};
use crate::text::lexer::{Notation, Token};
use crate::text::read::check_length;

/// Reads the text form.
///
/// # Errors
/// The first mistake: an `E` diagnostic, or `V22` and `V23` for a dimension or a mesh that cannot be.
pub fn parse(text: &str) -> Result<Schedule, Diagnostics> {
    parse_schedule(text).map_err(|diagnostic| vec![*diagnostic])
}

fn parse_schedule(text: &str) -> Parsed<Schedule> {
    check_length(text)?;
    let mut cx = Cursor::new(text, Notation::Module);
    let Header { name, pipeline, space, .. } = read_header(&mut cx, &["schedule"])?;
    let mut schedule = Schedule { name, pipeline, space, frames: Arena::new() };
    let mut frames: HashMap<&str, FrameId> = HashMap::new();
    while cx.peek() != Token::End {
        if cx.keyword("frame").is_err() {
            return Err(cx.unexpected(if schedule.frames.is_empty() {
                "a declaration or `frame`"
            } else {
                "`frame`"
            }));
        }
        let (name, span) = cx.sigil('@', "the name of the frame, `@name`")?;
        if frames.contains_key(name) {
            return Err(twice("frame", name, span));
        }
        let frame = Frame { name: name.to_owned(), ..Frame::default() };
        let reader = FrameReader {
            cx: &mut cx,
            schedule: &schedule,
            frames: &frames,
            frame,
            buffers: HashMap::new(),
            inside: Vec::new(),
        };
        let frame = reader.read()?;
        frames.insert(name, schedule.frames.push(frame));
    }
    Ok(schedule)
}

struct FrameReader<'r, 'a> {
    cx: &'r mut Cursor<'a>,
    schedule: &'r Schedule,
    frames: &'r HashMap<&'a str, FrameId>,
    frame: Frame,
    /// For look-up only, as the frames are.
    buffers: HashMap<&'a str, BufferId>,
    /// Buffers that lie in wires: the buffer, the wire with where it is named, and which part.
    inside: Vec<(BufferId, &'a str, Span, usize)>,
}

impl FrameReader<'_, '_> {
    fn read(mut self) -> Parsed<Frame> {
        self.cx.expect('(')?;
        self.frame.n_arguments = self.cx.count()?;
        self.cx.expect(')')?;
        self.frame.phase = read_phase(self.cx)?;
        self.cx.keyword("bytes")?;
        self.frame.bytes = self.cx.int()?;
        self.cx.keyword("events")?;
        self.frame.n_events = self.cx.count()?;
        self.cx.expect('{')?;
        while self.cx.eat(Token::Word("buffer")) {
            self.buffer()?;
        }
        for (buffer, name, span, part) in std::mem::take(&mut self.inside) {
            let wire = find(&self.frame, &self.buffers, name, span)?;
            self.frame.buffers[buffer].place = Place::Inside { whole: wire, part };
        }
        while !self.cx.eat(Token::Word("return")) {
            self.task()?;
        }
        let outputs = read_outputs(self.cx, |cx| buffer_name(cx, &self.frame, &self.buffers))?;
        let output = |(name, buffer): Named<'_, BufferId>| FrameOutput {
            name: name.map(|(name, _)| name.to_owned()),
            buffer,
        };
        self.frame.outputs = outputs.into_iter().map(output).collect();
        Ok(self.frame)
    }

    fn buffer(&mut self) -> Parsed<()> {
        let (name, span) = self.cx.sigil('$', "the name of the buffer, `$name`")?;
        self.cx.expect(':')?;
        let content = if self.cx.eat(Token::Word("wire")) {
            Content::Wire { dtype: read_dtype(self.cx)?, elements: self.cx.int()? }
        } else {
            Content::Tensor(read_type(self.cx, &self.schedule.space)?.into())
        };
        let (word, place_span) = self.cx.word("`at`, `in`, `argument`, `result`, `weight` or `input`")?;
        let place = match word {
            "at" => Place::Frame(self.cx.int()?),
            "in" => {
                let (wire, span) = self.cx.sigil('$', "the wire, `$name`")?;
                self.cx.keyword("part")?;
                let part = self.cx.count()?;
                // The wire may be declared later.
                let own = self.frame.buffers.next();
                self.inside.push((own, wire, span, part));
                Place::Inside { whole: own, part }
            }
            "argument" => Place::Argument(self.cx.count()?),
            "result" => Place::Result(self.cx.count()?),
            "weight" => Place::Weight(self.binding("param", place_span)?),
            "input" => Place::Input(self.binding("input", place_span)?),
            "state" => Place::State(self.binding("state", place_span)?),
            _ => {
                let places = ["at", "in", "argument", "result", "weight", "input", "state"];
                return Err(unknown("place", word, place_span, places));
            }
        };
        if self.buffers.insert(name, self.frame.buffers.next()).is_some() {
            return Err(twice("buffer", name, span));
        }
        self.frame.buffers.push(Buffer { name: name.to_owned(), content, place });
        Ok(())
    }

    fn binding(&mut self, op: &str, span: Span) -> Parsed<Binding> {
        match self.op(op, span)? {
            Op::Param(binding) | Op::Input(binding) | Op::State(binding) => Ok(binding),
            _ => unreachable!("sources have bindings"),
        }
    }

    /// An operation whose name was read; its attributes follow.
    fn op(&mut self, name: &str, span: Span) -> Parsed<Op> {
        let attrs = read_attrs(self.cx)?;
        make_op(name, span, attrs, &self.schedule.space, &NoFunctions)
    }

    fn task(&mut self) -> Parsed<()> {
        let expected = "`buffer`, `compute:`, `comm:` or `return`";
        let stream = self.cx.choice(expected, "stream", &Stream::ALL, Stream::name)?;
        self.cx.expect(':')?;
        let (work, span) = self.cx.word("an operation, `pack`, `exchange`, `unpack`, `copy` or `call`")?;
        let reads = match self.cx.peek() {
            Token::Sigil('$', _) => self.buffer_names()?,
            _ => Vec::new(),
        };
        let writes = if self.cx.eat(Token::Arrow) { self.buffer_names()? } else { Vec::new() };
        let work = match work {
            "pack" => Work::Pack(self.transfer()?),
            "exchange" => Work::Exchange(self.transfer()?),
            "unpack" => Work::Unpack(self.transfer()?),
            "copy" => Work::Copy,
            "call" => self.call(span)?,
            op => Work::Compute(self.op(op, span)?),
        };
        let waits = if self.cx.eat(Token::Word("wait")) { self.events()? } else { Vec::new() };
        let records = if self.cx.eat(Token::Word("record")) {
            let span = self.cx.span();
            let events = self.events()?;
            let one = match events.as_slice() {
                [event] => *event,
                _ => {
                    let message = format!("a task records one event, not {}", events.len());
                    return Err(mistake("E01", message, span, "one too many"));
                }
            };
            Some(one)
        } else {
            None
        };
        self.frame.tasks.push(Task { stream, work, reads, writes, waits, records });
        Ok(())
    }

    /// One parcel, or several joined by `and`.
    fn transfer(&mut self) -> Parsed<Transfer> {
        let mut parcels = vec![self.parcel()?];
        while self.cx.eat(Token::Word("and")) {
            parcels.push(self.parcel()?);
        }
        Ok(Transfer::of(parcels).expect("one parcel was read"))
    }

    fn parcel(&mut self) -> Parsed<Parcel> {
        let (name, span) = self.cx.word("a collective")?;
        let op = self.op(name, span)?;
        self.cx.keyword("from")?;
        let from = read_type(self.cx, &self.schedule.space)?;
        self.cx.keyword("to")?;
        let to = read_type(self.cx, &self.schedule.space)?;
        Ok(Parcel { op, from, to })
    }

    fn call(&mut self, span: Span) -> Parsed<Work> {
        let attrs = read_attrs(self.cx)?;
        let wrong = |message: String| mistake("E08", message, span, "the attributes of this call");
        let (mut callee, mut layers, mut base): (Option<FrameId>, Layers, u64) = (None, 0..1, 0);
        let mut others = Vec::new();
        for (key, value) in attrs {
            match (key.as_str(), value) {
                ("callee", Attr::Func(name)) => {
                    let known = self.frames.get(name.as_str()).copied();
                    let found =
                        known.ok_or_else(|| wrong(format!("no frame `@{name}` stands before this call")))?;
                    callee = Some(found);
                }
                ("layers", Attr::Range(start, end)) => layers = start..end,
                ("base", Attr::Int(offset)) => base = offset,
                (_, value) => others.push((key, value)),
            }
        }
        let mut others = Attrs::new("call", others);
        let names = Names { space: &self.schedule.space, functions: &NoFunctions };
        let stride = u64::read(&mut others, "stride", Some(0), names).map_err(wrong)?;
        let scan = Attribute::read(&mut others, "scan", None, names).map_err(wrong)?;
        let stage = Attribute::read(&mut others, "stage", None, names).map_err(wrong)?;
        others.finish().map_err(wrong)?;
        match callee {
            Some(callee) => Ok(Work::Call { callee, layers, stride, base, scan, stage }),
            None => Err(wrong("`call` lacks attribute `callee`".to_owned())),
        }
    }

    fn buffer_names(&mut self) -> Parsed<Vec<BufferId>> {
        self.cx.items(|cx| buffer_name(cx, &self.frame, &self.buffers))
    }

    fn events(&mut self) -> Parsed<Vec<EventId>> {
        self.cx.expect('(')?;
        let events = self.cx.items(|cx| {
            let (name, span) = cx.word("an event, `e0`")?;
            let number = name.strip_prefix('e').and_then(|n| n.parse::<u32>().ok());
            match number.filter(|n| format!("e{n}") == name) {
                Some(number) => Ok(EventId::new(number as usize)),
                None => {
                    Err(mistake("E06", format!("`{name}` is no event"), span, "events are `e0`, `e1`, …"))
                }
            }
        })?;
        self.cx.expect(')')?;
        Ok(events)
    }
}

fn buffer_name(cx: &mut Cursor<'_>, frame: &Frame, buffers: &HashMap<&str, BufferId>) -> Parsed<BufferId> {
    let (name, span) = cx.sigil('$', "a buffer, `$name`")?;
    find(frame, buffers, name, span)
}

fn find(frame: &Frame, buffers: &HashMap<&str, BufferId>, name: &str, span: Span) -> Parsed<BufferId> {
    let known = || frame.buffers.values().map(|b| b.name.as_str());
    buffers.get(name).copied().ok_or_else(|| unknown("buffer", name, span, known()))
}
