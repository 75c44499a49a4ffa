"""Where a number may be kept that a model reads, and the code through which its forward comes to it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a number is kept. `setup`: lines of the file; `made`: lines of `__init__`; `read`: an expression
    with `self` and `x`; `change`: lines with the model `m` and the new number `v`."""

    name: str
    read: str
    change: str
    setup: str = ""
    made: str = ""


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """Code around the expression `READ`. `use` is the expression in forward."""

    name: str
    use: str
    setup: str = ""
    methods: str = ""
    made: str = ""
    after: str = ""
    """Lines after the class."""


SOURCES = (
    Source("global", "N", "global N; N = v", "N = 2.0"),
    Source("global list", "L[1]", "L[1] = v", "L = [1.0, 2.0]"),
    Source("global dict", "D['a']['b']", "D['a']['b'] = v", "D = {'a': {'b': 2.0}}"),
    Source("deep list", f"{'L' + '[0]' * 9}", f"{'L' + '[0]' * 9} = v", f"L = {'[' * 9}2.0{']' * 9}"),
    Source("global set", "2.0 if 'k' in S else 3.0", "S.discard('k') if v != 2.0 else S.add('k')",
           "S = {'k'}"),
    Source("deque", "Q[0]", "Q[0] = v", "Q = collections.deque([2.0])"),
    Source("long list", "L[300]", "L[300] = v", "L = [2.0] * 600"),
    Source("long dict", "D[300]", "D[300] = v", "D = {n: 2.0 for n in range(600)}"),
    Source("UserDict", "U['a']", "U['a'] = v", "U = collections.UserDict(a=2.0)"),
    Source("ChainMap", "C['a']", "C.maps[1]['a'] = v", "C = collections.ChainMap({}, {'a': 2.0})"),
    Source("namespace", "C.n", "C.n = v", "C = types.SimpleNamespace(n=2.0)"),
    Source("dataclass", "C.n", "C.n = v",
           "@dataclasses.dataclass\nclass Config:\n    n: float = 2.0\nC = Config()"),
    Source("frozen, replaced", "C.n", "global C; C = Config(v)",
           "@dataclasses.dataclass(frozen=True)\nclass Config:\n    n: float = 2.0\nC = Config()"),
    Source("slots", "C.n", "C.n = v", "class Config:\n    __slots__ = ('n',)\nC = Config()\nC.n = 2.0"),
    Source("named tuple", "T.n", "global T; T = T._replace(n=v)",
           "T = collections.namedtuple('T', 'n')(2.0)"),
    Source("class attribute", "Config.n", "Config.n = v", "class Config:\n    n = 2.0"),
    Source("attribute of a base", "Config.n", "Base.n = v",
           "class Base:\n    n = 2.0\nclass Config(Base):\n    pass"),
    Source("object of a class", "Config.inner.n", "Config.inner.n = v",
           "class Config:\n    inner = types.SimpleNamespace(n=2.0)"),
    Source("own class attribute", "self.kept", "type(m).kept = v", made="type(self).kept = 2.0"),
    Source("metaclass", "Config.n", "Meta.n = v",
           "class Meta(type):\n    n = 2.0\nclass Config(metaclass=Meta):\n    pass"),
    Source("descriptor", "Config().n", "vars(Config)['n'].held = v",
           "class Held:\n    held = 2.0\n    def __get__(self, o, k=None):\n        return self.held\n"
           "class Config:\n    n = Held()"),
    Source("getattr of an object", "C.n", "vars(C)['held']['n'] = v",
           "class Config:\n    def __init__(self):\n        self.held = {'n': 2.0}\n"
           "    def __getattr__(self, name):\n        return self.held[name]\nC = Config()"),
    Source("attribute", "self.n", "m.n = v", made="self.n = 2.0"),
    Source("list of the model", "self.l[0][0]", "m.l[0][0] = v", made="self.l = [[2.0]]"),
    Source("config of the model", "self.c.d.n", "m.c.d.n = v",
           made="self.c = types.SimpleNamespace(d=types.SimpleNamespace(n=2.0))"),
    Source("vars", "vars(self)['n']", "m.n = v", made="self.n = 2.0"),
    Source("submodule", "self.inner.n", "m.inner.n = v",
           made="self.inner = nn.Identity()\nself.inner.n = 2.0"),
    Source("training", "2.0 if self.training else 3.0", "m.train(v == 2.0)"),
    Source("plain tensor", "self.t", "m.t.fill_(v)", made="self.t = torch.full((), 2.0)"),
    Source("global tensor", "W", "W.fill_(v)", "W = torch.full((), 2.0)"),
    Source("tensor's attribute", "self.w.scale", "m.w.scale = v",
           made="self.w = nn.Parameter(torch.ones(3))\nself.w.scale = 2.0"),
    Source("numpy", "float(A[1])", "A[1] = v", "import numpy\nA = numpy.array([1.0, 2.0])"),
    Source("large numpy", "float(A[1])", "A[1] = v", "import numpy\nA = numpy.full(5000, 2.0)"),
    Source("array", "A[0]", "A[0] = v", "import array\nA = array.array('d', [2.0])"),
    Source("bytes", "float(B[0])", "B[0] = int(v)", "B = bytearray([2])"),
    Source("environment", "float(os.environ['ATTN_N'])", "os.environ['ATTN_N'] = str(v)",
           "os.environ['ATTN_N'] = '2.0'"),
    Source("getenv", "float(os.getenv(KEY, '2.0'))", "os.environ.update(ATTN_K=str(v))",
           "KEY = 'ATTN_K'\nos.environ.pop(KEY, None)"),
    Source("context variable", "V.get()", "V.set(v)", "V = contextvars.ContextVar('V', default=2.0)"),
    Source("thread's own", "O.n", "O.n = v", "O = threading.local()\nO.n = 2.0"),
    Source("weak reference", "R().n", "C.n = v",
           "class Config:\n    n = 2.0\nC = Config()\nR = weakref.ref(C)"),
    Source("weak dictionary", "D['a'].n", "C.n = v",
           "class Config:\n    n = 2.0\nC = Config()\nD = weakref.WeakValueDictionary(a=C)"),
    Source("other file", "other.N", "other.N = v", "other.N = 2.0"),
    Source("other file's list", "other.L[0]", "other.L[0] = v", "other.L = [2.0]"),
    Source("other file, imported inside", "__import__('theirs').N", "other.N = v", "other.N = 2.0"),
    Source("other file by a made name", "getattr(other, 'N' + 'N')", "other.NN = v", "other.NN = 2.0"),
    Source("globals()", "globals()['N' + 'M']", "global NM; NM = v", "NM = 2.0"),
    Source("sys.modules", "sys.modules['theirs'].N", "other.N = v", "other.N = 2.0"),
    Source("default", "defaulted()", "defaulted.__defaults__ = (v,)", "def defaulted(n=2.0):\n    return n"),
    Source("default list", "defaulted()", "defaulted.__defaults__[0][0] = v",
           "def defaulted(n=[2.0]):\n    return n[0]"),
    Source("keyword default", "defaulted()", "defaulted.__kwdefaults__['n'] = v",
           "def defaulted(*, n=2.0):\n    return n"),
    Source("function attribute", "counted.n", "counted.n = v", "def counted():\n    pass\ncounted.n = 2.0"),
    Source("closure", "closed()", "set_it(v)",
           "def make():\n    n = 2.0\n    def get():\n        return n\n    def put(v):\n"
           "        nonlocal n\n        n = v\n    return get, put\nclosed, set_it = make()"),
    Source("closure of a closure", "closed()()", "cell[0] = v",
           "cell = [2.0]\ndef make(c):\n    def outer():\n        def inner():\n            return c[0]\n"
           "        return inner\n    return outer\nclosed = make(cell)"),
    Source("partial", "P()", "global P; P = functools.partial(float, v)",
           "P = functools.partial(float, 2.0)"),
    Source("partial's keyword", "P()", "P.keywords['n'][0] = v",
           "P = functools.partial(lambda n: n[0], n=[2.0])"),
    Source("replaced function", "F()", "global F; F = (lambda: 2.0) if v == 2.0 else (lambda: 3.0)",
           "F = lambda: 2.0"),
    Source("replaced code", "coded()", "coded.__code__ = (two if v == 2.0 else three).__code__",
           "def coded():\n    return 2.0\ndef two():\n    return 2.0\ndef three():\n    return 3.0"),
    Source("replaced method", "self.way()", "type(m).way = (lambda s: 2.0) if v == 2.0 else (lambda s: 3.0)",
           made="type(self).way = lambda s: 2.0"),
    Source("function in a dict", "D['f']()", "D['f'] = (lambda: 2.0) if v == 2.0 else (lambda: 3.0)",
           "D = {'f': lambda: 2.0}"),
    Source("bound method", "get()", "C.n = v",
           "class Config:\n    n = 2.0\n    def get(self):\n        return self.n\nC = Config()\n"
           "get = C.get"),
    Source("property", "C.twice / 2", "C.n = v",
           "class Config:\n    n = 2.0\n    @property\n    def twice(self):\n        return self.n * 2\n"
           "C = Config()"),
    Source("dict's subclass", "C.get_it()", "C.n = v",
           "class Config(dict):\n    n = 2.0\n    def get_it(self):\n        return self.n\nC = Config()"),
    Source("operator", "1.0 * C", "Config.n = v",
           "class Config:\n    n = 2.0\n    def __rmul__(self, o):\n        return o * self.n\nC = Config()"),
    Source("kept result", "kept()", "global N; N = v; kept.cache_clear()",
           "N = 2.0\n@functools.lru_cache\ndef kept():\n    return N\nkept()"),
    Source("method of tensors", "x.mul_it()", "torch.Tensor.mul_it = lambda t: v",
           "torch.Tensor.mul_it = lambda t: 2.0"),
    Source("function of torch", "torch.numbered()", "torch.numbered = lambda: v",
           "torch.numbered = lambda: 2.0"),
    Source("builtin", "NUMBER_B", "import builtins; builtins.NUMBER_B = v",
           "import builtins\nbuiltins.NUMBER_B = 2.0"),
    Source("sys.argv", "float(sys.argv[-1])", "sys.argv[-1] = str(v)", "sys.argv[-1] = '2.0'"),
    Source("object in a set", "next(iter(S)).n", "next(iter(S)).n = v",
           "class Config:\n    n = 2.0\nS = {Config()}"),
    Source("memory view", "float(B[0])", "B[0] = int(v)", "B = memoryview(bytearray([2]))"),
    Source("another class", "C.n", "C.__class__ = Other if v != 2.0 else Config",
           "class Config:\n    n = 2.0\nclass Other:\n    n = 3.0\nC = Config()"),
    Source("single dispatch", "told(1)", "told.register(int)(lambda n: v)",
           "@functools.singledispatch\ndef told(n):\n    return 1.0\n"
           "told.register(int)(lambda n: 2.0)"),
    Source("cached property", "C.n", "vars(C).update(n=v)",
           "class Config:\n    @functools.cached_property\n    def n(self):\n        return 2.0\n"
           "C = Config()\nC.n"),
    Source("default dtype", "2.0 if torch.get_default_dtype() == torch.float32 else 3.0",
           "torch.set_default_dtype(torch.float32 if v == 2.0 else torch.float64)"),
    Source("deterministic", "3.0 if torch.are_deterministic_algorithms_enabled() else 2.0",
           "torch.use_deterministic_algorithms(v != 2.0)"),
)  # fmt: skip

WRAPPERS = (
    Wrapper("forward", "READ"),
    Wrapper("method", "self.factor(x)", methods="def factor(self, x):\n    return READ"),
    Wrapper("property", "self.factor",
            methods="@property\ndef factor(self):\n    x = self.h.weight\n    return READ"),
    Wrapper("static method", "self.factor(self, x)",
            methods="@staticmethod\ndef factor(self, x):\n    return READ"),
    Wrapper("helper", "helper(self, x)", "def helper(self, x):\n    return READ"),
    Wrapper("helper of a helper", "h3(self, x)",
            "def h1(self, x):\n    return READ\ndef h2(self, x):\n    return h1(self, x)\n"
            "def h3(self, x):\n    return h2(self, x)"),
    Wrapper("in a list", "HELPERS[0](self, x)", "HELPERS = [lambda self, x: READ]"),
    Wrapper("in a dict of lists", "HELPERS['a'][0](self, x)", "HELPERS = {'a': [lambda self, x: READ]}"),
    Wrapper("partial", "PART(x=x, self=self)", "PART = functools.partial(lambda self, x: READ)"),
    Wrapper("callable object", "CALL(self, x)",
            "class Call:\n    def __call__(own, self, x):\n        return READ\nCALL = Call()"),
    Wrapper("inherited", "self.factor(x)", "class Mixin:\n    def factor(self, x):\n        return READ"),
    Wrapper("nested function", "self.factor(x)",
            methods="def factor(self, x):\n    def inner():\n        return READ\n    return inner()"),
    Wrapper("generator", "sum((READ) for _ in (0,))"),
    Wrapper("made name", "getattr(self, 'fac' + 'tor')(x)", methods="def factor(self, x):\n    return READ"),
    Wrapper("kept function", "self.__dict__['f'](self, x)", "def helper(self, x):\n    return READ",
            made="self.__dict__['f'] = helper"),
    Wrapper("decorated forward", "1.0",
            "def scaled(f):\n    @functools.wraps(f)\n    def run(self, x):\n"
            "        return f(self, x) * (READ)\n    return run",
            after="Model.attend = scaled(Model.attend)"),
    Wrapper("hook", "1.0", "def hook(self, args, out):\n    x = args[0]\n    return out * (READ)",
            made="self.register_forward_hook(hook)"),
    Wrapper("hook that is kept", "1.0",
            "def hook(self, args, out):\n    x = args[0]\n    return out * (READ)",
            made="self.handles = [self.register_forward_hook(hook)]"),
    Wrapper("submodule", "self.part(x, [self])",
            "class Part(nn.Module):\n    def forward(own, x, held):\n        self = held[0]\n"
            "        return READ", made="self.part = Part()"),
    Wrapper("function of another file", "other.helper(self, x)",
            "def helper(self, x):\n    return READ\nother.helper = helper"),
)  # fmt: skip
