class KMeans:
    lossy = True
    def __init__(self, bits):
        self.value_bits = bits
