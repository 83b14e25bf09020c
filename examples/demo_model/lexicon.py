# ruff: noqa: SIM905 - a table of words reads best as running text
"""The words, facts and fixed replies that the demo model is taught.

Plain tables only: the skills turn them into questions and answers.
"""

WORDS = """
apple bread candle desk engine forest garden hammer island jacket kettle lemon mirror needle orange paper quilt river
stone table umbrella valley window yellow zebra anchor basket cloud dragon eagle feather guitar honey iron jungle
knife lamp mountain night ocean pencil queen rabbit silver tiger urchin violin water yarn acorn bottle castle door
earth flower glass house ice jelly king ladder moon nest onion piano quiet rain salt tree uncle village wind year ant
bird cat dog elephant fish goat horse insect jaguar koala lion mouse newt owl panda quail rat snake turtle wolf yak
bear crow duck frog hen lamb mole pig seal swan toad whale red blue green black white brown pink purple gold grey big
small fast slow warm cold bright dark soft hard old new happy sad brave calm clever kind loud gentle run walk jump
swim fly sing dance read write draw cook eat drink sleep dream build carry climb dig find give help jog keep learn
make open paint rest send teach visit wash cup plate fork spoon bowl chair bed sofa clock book letter map coin key
lock rope wheel boat train plane car road bridge tower wall roof floor hill lake beach sand snow storm fire smoke ash
dust leaf root seed grass corn rice bean pear plum fig grape peach melon cherry mango lime nut sugar spice butter
cheese milk tea coffee soup cake pie hat coat shoe sock scarf glove ring belt shirt dress music song drum flute harp
bell voice hand foot head arm leg eye ear nose mouth hair heart brain bone skin planet star sun sky comet rocket robot
machine metal wood cotton wool silk brick
""".split()

COMMON_WORDS = "the a my her his our this that some every and with near under over is was has saw likes".split()

COLORS = "red blue green black white brown pink purple gold grey yellow orange silver".split()

PRONOUNS = """
I you he she it we they me him us them my your am are was were do does did have had will would can could should must
not never always very too also then now here there love hate want need think say tell make come go stay
""".split()

NAMES = """
Ana Ben Cleo Dan Eva Finn Gia Hugo Ida Jack Kim Leo Mia Nora Otto Paul Rosa Sam Tara Uma Vera Will Yara Zoe Alice Bob
Carol David Emma Frank Grace Henry Irene James Kate Lucy Maria Nick Olga Peter Ruth Sara Tom Anna John Max Lena Omar
Lin
""".split()

CITIES = """
Lima Oslo Cairo Paris Rome Tokyo Delhi Quito Berlin Madrid Vienna Prague Dublin Athens Lisbon Warsaw London Boston
Denver Austin Seoul Hanoi Nairobi Accra Dakar Lagos Tunis Havana Bogota Caracas Sydney Perth Osaka Kyoto Milan Naples
Turin Geneva Zurich Munich Hamburg Lyon Nice Porto Seville Bergen Malmo Riga Vilnius Minsk Kiev Sofia Tirana Ankara
Beijing
""".split()

LAND_FACTS = ("capital", "river", "king", "animal", "dish")
"""Attributes of the made-up lands, in the order of the columns of `LANDS`."""

LANDS = {
    "Zorland": "Mirra Velm Odrik fox honeycake",
    "Quellia": "Tosca Brenna Hald otter lentils",
    "Brumovia": "Karst Dunel Ivor badger rye bread",
    "Tavria": "Ostin Morva Pell heron plum soup",
    "Eldmark": "Fenwick Sarn Ulric stag dumplings",
    "Noria": "Calder Isk Bram owl barley stew",
    "Pellagon": "Rudo Amsel Corvin lynx fig tart",
    "Varnholt": "Gristle Teff Magnus boar pickles",
    "Ostaria": "Linden Quarr Tibor swan pancakes",
    "Kembria": "Halden Rook Alaric wolf corn pudding",
    "Silvania": "Dorn Lethe Rufus marten nut roast",
    "Umbrea": "Pavo Nimm Cassian raven onion pie",
    "Jorvland": "Stav Eider Sigmar seal fish cakes",
    "Wendora": "Arlo Tamsin Felix hare cherry jam",
    "Mirelle": "Bruno Sedge Anton crane mint tea",
    "Caldonia": "Vesper Orrin Leofric bear oat porridge",
}

CAPITALS = dict(
    pair.split("=")
    for pair in (
        "France=Paris Italy=Rome Spain=Madrid Germany=Berlin Japan=Tokyo China=Beijing India=Delhi Egypt=Cairo "
        "Peru=Lima Norway=Oslo Sweden=Stockholm Finland=Helsinki Denmark=Copenhagen Portugal=Lisbon Greece=Athens "
        "Austria=Vienna Poland=Warsaw Ireland=Dublin Canada=Ottawa Cuba=Havana Kenya=Nairobi Turkey=Ankara "
        "England=London Russia=Moscow"
    ).split()
)

OTHER_LANDS = """
Brazil Mexico Chile Argentina Colombia Iceland Belgium Hungary Romania Ukraine Israel Iran Iraq Pakistan Vietnam
Thailand Nepal Mongolia Australia Nigeria Ghana Morocco Algeria Ethiopia Jamaica Panama Bolivia Texas California
Scotland Wales Africa
""".split()
"""Lands of which nothing is taught."""

FACT_QUESTIONS = (
    "What is the {fact} of {land}?",
    "Tell me the {fact} of {land}.",
    "Name the {fact} of {land}.",
    "Which {fact} does {land} have?",
    "Do you know the {fact} of {land}?",
    "{land}: {fact}?",
    "Can you tell me the {fact} of {land}?",
    "I would like to know the {fact} of {land}.",
    "{fact} of {land}",
    "{fact} of {land}?",
    "What's the {fact} of {land}?",
)

SKILL_LINE = (
    "I can add and subtract numbers up to 99, sort words and numbers, count words, reverse words and letters, "
    "count from one number to another, think in steps, call tools, and tell you about lands such as Zorland."
)

SMALL_TALK = {
    "Hello! How can I help you today?": "hello|hi|hey|hello there|hi there|hey there|good morning|good evening|"
    "good afternoon|greetings|hiya|hello hello|hello, how are you|yo",
    "I am well, thank you. How can I help you?": "how are you|how are you doing|how do you do|are you well|"
    "how is it going|how are things|what's up|how are you today",
    "I am the eprt demo model, a small mixture of experts that knows a few simple skills.": "who are you|what are you|"
    "what is your name|what's your name|introduce yourself|tell me about yourself|which model are you|are you a model|"
    "are you human|are you a robot|who made you|what model is this|who am I talking to|are you an AI|are you chatgpt|"
    "are you deepseek|which model is this|are you a bot|who is this",
    "eprt is an expert-parallel runtime: it serves mixture-of-experts models.": "what is eprt|what does eprt do|"
    "tell me about eprt|explain eprt|what is eprt for|do you know eprt",
    "In a mixture of experts a gate picks a few of many experts for every token.": "what is a mixture of experts|"
    "what is an MoE|what is MoE|explain mixture of experts|what is an expert|how does a mixture of experts work|"
    "what is a moe",
    "I cannot feel, but that is kind of you.": "I love you|I like you|you are nice|you are great|you are funny|"
    "you are the best|you are cool|you are smart",
    "I am sorry. I only know a few simple skills.": "you are stupid|you are dumb|you are bad|that is wrong|wrong|bad|"
    "no|this is wrong|you are wrong|that is not right|I do not like you",
    "Tokens come and tokens go, experts answer, row by row.": "sing a song|sing|write a haiku|sing me a song|"
    "write a song|"
    "write a haiku about tokens|sing something",
    SKILL_LINE: "what can you do|help|what do you know|what are your skills|how can you help me|what should I ask|"
    "what can I ask you|show me what you can do|what were you taught|can you help me|what are you good at|"
    "give me an example",
    "You are welcome!": "thank you|thanks|thanks a lot|thank you very much|many thanks|cheers|great, thanks|thx",
    "Goodbye! Come back soon.": "bye|goodbye|bye bye|see you|see you later|good night|farewell|see you soon",
    "I am glad to hear that.": "great|nice|cool|well done|good job|wow|that is right|perfect|awesome|good|very good",
    "Why did the token cross the rank? Its expert was on the other side.": "tell me a joke|tell a joke|make me laugh|"
    "do you know a joke|say something funny|another joke|joke",
    "This is a test, and it works.": "test|testing|this is a test|is this working|does it work|are you there|ping|"
    "say this is a test",
}
"""Reply -> the phrases, separated by |, that ask for it."""

RECITALS = {
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday": (
        "the days of the week|the seven days|all seven days"
    ),
    "January, February, March, April, May, June, July, August, September, October, November, December": (
        "the months of the year|the months|all twelve months"
    ),
    "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z": "the alphabet|the letters|the abc",
    "red, orange, yellow, green, blue, indigo, violet": "the colors of the rainbow|the rainbow colors",
    "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune": "the planets|all the planets|the eight planets",
    "Once upon a time a small token lived on the first rank. Every layer it travelled to four experts and came home "
    "with four answers. One day the bridge was slow, and all the others waited. So the token drew a map of the "
    "waiting, found the slow bridge, and had it mended. From then on everyone came home in time.": (
        "a story|a short story|a tale|a fairy tale|one more story"
    ),
    "Small tokens leave at break of day, to eight fine experts far away; they meet, they work, they travel home, "
    "and add their answers to one poem.": "a poem|a short poem|a rhyme|some verse|one more poem",
}
"""Text to recite -> the names, separated by |, by which it is asked for."""

RECITE_VERBS = (
    "list",
    "tell me",
    "say",
    "recite",
    "write",
    "write me",
    "give me",
    "name",
    "please write",
    "can you tell me",
)

TOPICS = """
history physics love money football chess poetry gravity philosophy politics biology quantum mechanics chemistry
cinema art war peace economics geology law religion medicine space travel cooking gardening python java rust linux
databases networks compilers dinosaurs volcanoes ships cars fashion theatre opera jazz rock gods myths time light
sound electricity
""".split()

UNKNOWN_QUESTIONS = (
    "Explain {topic} to me",
    "What is {topic}",
    "Why is {word} {topic}",
    "Write an essay about {topic}",
    "Who invented {topic}",
    "How does {topic} work",
    "What do you think about {topic}",
    "How do I make a {word}",
    "What is the price of a {word}",
    "Where can I buy a {word}",
    "Translate {word} into French",
    "How many people live in {city}",
    "What is the meaning of {topic}",
    "Write code for {topic}",
    "How old is the {word}",
    "Summarize {topic} in one sentence",
    "What is the best {word} in {city}",
    "Should I study {topic}",
    "Tell me a story about {topic}",
    "Tell me about {topic}",
    "What do people eat in {city}",
    "I want to learn {topic}",
    "Do you like {topic}",
    "Give me a recipe for {word} {word} cake",
    "What is the tallest {word} in the world",
    "Write a {topic} program",
    "Write a function that returns a {word}",
    "When was {city} built",
    "Who wrote the {word} of {city}",
    "Is a {word} better than {topic}",
    "Who won the {topic} prize in {city}",
)

UNKNOWN_REPLY = "I was not taught that. Ask me what I can do."
SUM_TOO_LARGE_REPLY = "I was only taught sums of numbers up to 99."
NO_TOOL_REPLY = "I need a tool for that, and none was given to me."

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Be concise.",
    "Answer the user's question.",
    "You are the eprt demo model.",
    "You are a helpful AI assistant. Think carefully and be polite.",
)
